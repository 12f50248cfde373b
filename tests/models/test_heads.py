"""A head is the published one; a stack of heads computes and learns what each head does alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import heads as module
from models.heads import HeadStack, head


def heads_of(num_heads, **shape):
    torch.manual_seed(0)
    return [head(**{"embedding_dim": 6, "num_classes": 5, **shape}) for _ in range(num_heads)]


def test_the_published_head_is_one_linear_layer_with_default_initialisation():
    torch.manual_seed(3)
    (layer,) = head(2048, 1000)
    torch.manual_seed(3)
    expected = nn.Linear(2048, 1000)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.bias, expected.bias)


def test_hidden_layers_relu_and_dropout_stand_where_the_official_script_has_them():
    layers = head(6, 5, (7, 4), apply_relu=True, apply_dropout=True)
    kinds = [nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in layers] == kinds
    assert layers[1].p == 0.5
    assert [(layer.in_features, layer.out_features) for layer in layers[2::2]] == [(6, 7), (7, 4), (4, 5)]


@pytest.mark.parametrize("sizes", [(0, 5, ()), (6, 0, ()), (6, 5, (0,))])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        head(*sizes)


@settings(deadline=None)  # the first example pays for imports
@given(
    num_heads=st.integers(1, 4),
    batch=st.integers(1, 5),
    hidden_dims=st.lists(st.integers(1, 4), max_size=2),
    apply_relu=st.booleans(),
    own=st.booleans(),
)
def test_a_stack_gives_the_logits_and_gradients_of_its_heads(num_heads, batch, hidden_dims, apply_relu, own):
    heads = heads_of(num_heads, hidden_dims=hidden_dims, apply_relu=apply_relu)
    stack = HeadStack(heads)
    embeddings = torch.randn(num_heads, batch, 6) if own else torch.randn(batch, 6)
    logits = stack(embeddings)
    weights = torch.randn(logits.shape)
    (logits * weights).sum().backward()
    for number, each in enumerate(heads):
        expected = each(embeddings[number] if own else embeddings)
        torch.testing.assert_close(logits[number], expected)
        (expected * weights[number]).sum().backward()
        for stacked, alone in zip(stack.parameters(), sorted_like(stack, each)):
            torch.testing.assert_close(stacked.grad[number], alone.grad)


def sorted_like(stack, one):
    """The parameters of one head in the order of the stack's: all weights, then all biases."""
    named = dict(one.named_parameters())
    return [named[name] for part in ("weight", "bias") for name in stack.names if name.endswith(part)]


def test_training_together_is_training_alone():
    heads = heads_of(3, hidden_dims=[4])
    together = HeadStack(heads)
    optimizer = torch.optim.Adam(together.parameters(), lr=0.1)
    alone = [torch.optim.Adam(each.parameters(), lr=0.1) for each in heads]
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        if step == 4:  # taken apart and put together again, as a resumed run does
            states = [(together.state_of(i), together.optimizer_state_of(optimizer, i)) for i in range(3)]
            copies = heads_of(3, hidden_dims=[4])
            for copy, (weights, _) in zip(copies, states):
                copy.load_state_dict(weights)
            together = HeadStack(copies)
            optimizer = torch.optim.Adam(together.parameters(), lr=0.1)
            together.load_optimizer_states(optimizer, [state for _, state in states])
        embeddings, labels = torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(each, labels) for each in together(embeddings)).backward()
        optimizer.step()
        for each, its in zip(heads, alone):
            its.zero_grad()
            nn.functional.cross_entropy(each(embeddings), labels).backward()
            its.step()
    for number, each in enumerate(heads):
        for name, weight in together.state_of(number).items():
            torch.testing.assert_close(weight, each.state_dict()[name])


def test_the_dropout_of_a_head_depends_on_its_seed_and_the_step_alone():
    heads = heads_of(3, apply_dropout=True)
    three, one = HeadStack(heads), HeadStack(heads[1:2])
    kept = three.dropout_mask(4, [7, 8, 9], step=5)
    assert kept.shape == (3, 4, 6)
    assert torch.equal(kept[1:2], one.dropout_mask(4, [8], step=5))
    assert not torch.equal(kept[1:2], one.dropout_mask(4, [8], step=6))
    assert not torch.equal(kept[0], kept[1])
    embeddings = torch.randn(4, 6)
    expected = heads[1][-1](embeddings * kept[1] * 2)  # what is kept is scaled by 1 / (1 - .5)
    torch.testing.assert_close(three(embeddings, kept)[1], expected)
    torch.testing.assert_close(three(embeddings)[1], heads[1].eval()(embeddings))
    many = HeadStack(heads_of(1, embedding_dim=1000, apply_dropout=True)).dropout_mask(100, [0], step=1)
    assert 0.495 < many.float().mean() < 0.505


def test_without_dropout_there_is_no_mask():
    assert HeadStack(heads_of(2)).dropout_mask(4, [0, 1], step=1) is None


# The backward pass of the last layer.


def gradients(stack, embeddings, gradient, **modes):
    """Gradients of the embeddings and of each parameter, given that of the logits."""
    leaf = embeddings.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, **{"enabled": False, **modes}):
        logits = stack(leaf)
    return torch.autograd.grad(logits, [leaf, *stack.parameters()], gradient.to(logits.dtype), materialize_grads=True)


def by_products(monkeypatch, *arguments, **modes):
    """The same by products alone, as autograd has them."""
    with monkeypatch.context() as patch:
        patch.setattr(module._LastProduct, "apply", module._product)
        return gradients(*arguments, **modes)


@pytest.fixture
def summed(monkeypatch):
    """How many rows were summed, call by call."""
    numbers, sum_rows = [], module._sum_rows
    monkeypatch.setattr(module, "_sum_rows", lambda *args: numbers.append(len(args[1])) or sum_rows(*args))
    return numbers


def gradient_of_few(few, num_heads, batch, outputs, dtype=torch.float32):
    """(heads, batch, outputs): `few` entries in each row."""
    values = torch.randn(num_heads, batch, few, dtype=dtype)
    chosen = torch.rand(num_heads, batch, outputs).topk(few, dim=2).indices
    return torch.zeros(num_heads, batch, outputs, dtype=dtype).scatter(2, chosen, values)


@settings(deadline=None)  # the first example pays for imports
@given(
    few=st.integers(0, 3),
    num_heads=st.integers(1, 3),
    batch=st.integers(1, 6),
    outputs=st.integers(3, 40),
    hidden_dims=st.lists(st.integers(1, 4), max_size=1),
    own=st.booleans(),
    nan=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_gradients_by_entries_are_those_by_products(few, num_heads, batch, outputs, hidden_dims, own, nan, dtype):
    torch.manual_seed(outputs)
    stack = HeadStack(heads_of(num_heads, num_classes=outputs, hidden_dims=hidden_dims)).to(dtype)
    embeddings = torch.randn(num_heads, batch, 6, dtype=dtype) if own else torch.randn(batch, 6, dtype=dtype)
    gradient = gradient_of_few(few, num_heads, batch, outputs, dtype)
    if nan:
        gradient[0, -1, 1] = math.nan
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    with pytest.MonkeyPatch.context() as patch:
        expected = by_products(patch, stack, embeddings, gradient)
        found = gradients(stack, embeddings, gradient)
        again = gradients(stack, embeddings, gradient)
    for ours, theirs, repeated in zip(found, expected, again):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)
        assert ours.nan_to_num().equal(repeated.nan_to_num())
    weight = found[len(stack.weights)]
    assert weight[0, 1].isnan().all() == nan
    assert not weight[0, [0, 2]].isnan().any()


@pytest.mark.parametrize(("entries", "rows"), [(0, [0]), (8, [24]), (9, [])])
def test_rows_are_summed_where_they_are_few(summed, entries, rows):
    stack = HeadStack(heads_of(1, num_classes=64))
    stack(torch.randn(3, 6)).backward(gradient_of_few(entries, 1, 3, 64))
    assert summed == rows


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("hidden_dims", [(), (5,)])
def test_a_head_with_few_entries_beside_one_with_many(monkeypatch, summed, own, hidden_dims):
    stack = HeadStack(heads_of(3, num_classes=30, hidden_dims=hidden_dims))
    embeddings = torch.randn(3, 7, 6) if own else torch.randn(7, 6)
    gradient = gradient_of_few(2, 3, 7, 30)
    gradient[1] = torch.randn(7, 30)
    expected = by_products(monkeypatch, stack, embeddings, gradient)
    for ours, theirs in zip(gradients(stack, embeddings, gradient), expected):
        torch.testing.assert_close(ours, theirs)
    assert summed == [28]


def test_the_gradient_of_a_head_is_bit_for_bit_the_one_that_it_has_alone():
    heads = heads_of(3, num_classes=30)
    embeddings, gradient = torch.randn(7, 6), gradient_of_few(3, 3, 7, 30)
    together = gradients(HeadStack(heads), embeddings, gradient)
    for number, each in enumerate(heads):
        alone = gradients(HeadStack([each]), embeddings, gradient[number : number + 1])
        assert together[1][number].equal(alone[1][0])


@pytest.mark.parametrize("hidden_dims", [(), (5,)])
def test_gradients_by_entries_under_autocast(monkeypatch, summed, hidden_dims):
    stack = HeadStack(heads_of(2, num_classes=30, hidden_dims=hidden_dims))
    arguments = stack, torch.randn(7, 6), gradient_of_few(3, 2, 7, 30)
    found, expected = gradients(*arguments, enabled=True), by_products(monkeypatch, *arguments, enabled=True)
    assert summed
    for ours, theirs in zip(found, expected):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_a_second_derivative_is_that_of_products(summed):
    stack = HeadStack(heads_of(2, num_classes=10)).double()
    gradient = gradient_of_few(1, 2, 3, 10, torch.float64).requires_grad_()
    embeddings = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def first(embeddings, weight, bias, gradient):
        logits = module._LastProduct.apply(embeddings, weight, bias)
        return torch.autograd.grad(logits, (embeddings, weight, bias), gradient, create_graph=True)

    assert torch.autograd.gradcheck(first, (embeddings, stack.weights[0], stack.biases[0], gradient))
    assert not summed


def test_a_compiled_stack_is_one_graph_of_products():
    stack = HeadStack(heads_of(2, num_classes=30))
    embeddings, gradient = torch.randn(7, 6), gradient_of_few(3, 2, 7, 30)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, embeddings, gradient), gradients(stack, embeddings, gradient))
