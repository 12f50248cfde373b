# Sourced by the table scripts, which state what is theirs: `name`, and what differs from these.
seeds="0 1" schedule="" smooth=("0. 0. 0. 0. 1.") others=()

# Prints the rows: of each seed softmax cross-entropy, the smooth top-k loss over `smooth`, and each relaxed method.
#   published COMMAND inverse_temperature-of-sorts inverse_temperature-of-networks P_K...
published() {
  local command=$1 sorts=$2 networks=$3 seed record p_k method
  for seed in $seeds; do
    record="--seed $seed --results results/$name.csv$schedule"
    echo "$command --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. $record"
    for p_k in "${smooth[@]}"; do
      echo "$command --method smooth_hard_topk --inverse_temperature 1. --p_k $p_k $record"
    done
    for p_k in "${@:4}"; do
      for method in \
        "neuralsort --inverse_temperature $sorts" \
        "softsort --inverse_temperature $sorts" \
        "sinkhorn_sort" \
        "splitter_selection --distribution logistic_phi --inverse_temperature $networks --art_lambda .5"; do
        echo "$command --method $method --p_k $p_k $record"
      done
    done
  done
}

# Takes --short out of the arguments, of which `others` are left: rows go to another file, with FLAGS.
#   options FLAGS ARGUMENTS
options() {
  local flags=$1 word
  for word in "${@:2}"; do
    if [ "$word" = --short ]; then name=${name}_short schedule=" $flags"; else others+=("$word"); fi
  done
}
