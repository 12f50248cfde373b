#!/usr/bin/env bash
# A real Slurm of one node on this machine, for tests and for trying scripts/launch.py --slurm: munged, slurmctld and
# slurmd on 127.0.0.1, everything they write in FOLDER. Needs no systemd and no cgroups, and so runs in a container; as
# root, or as a user (who is then the only one it runs jobs for). Debian and Ubuntu:
#   apt-get install slurmctld slurmd slurm-client munge
#   scripts/sweeping/slurm_on_loopback.sh start FOLDER      # then: export SLURM_CONF=FOLDER/slurm.conf
#   scripts/sweeping/slurm_on_loopback.sh stop FOLDER       # cancels what runs and ends the three daemons
# Partitions: main, and urgent, whose jobs preempt main's (which are requeued). The node claims 4 CPUs, however many
# there are, and no accounting, as on small clusters. Exit status 1, with a sentence, where it does not come up.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 1
}

[ $# = 2 ] || { echo "usage: scripts/sweeping/slurm_on_loopback.sh start|stop FOLDER" >&2; exit 2; }
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin:/sbin # where the daemons are, also for a user

write_configuration() {
  local host ports
  host=$(hostname -s)
  # Below the kernel's range for outgoing connections, and not Slurm's own: a cluster's daemon may run here too.
  ports=$((20000 + RANDOM % 10000))
  cat > "$SLURM_CONF" << END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ports
SlurmdPort=$((ports + 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=$host MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
}

start() {
  local program waited
  for program in munged slurmctld slurmd sbatch srun scontrol sinfo; do
    command -v "$program" > /dev/null || fail "$program is not installed: apt-get install slurmctld slurmd slurm-client munge"
  done
  mkdir -p "$folder/state" "$folder/spool"
  chmod 755 "$folder"
  write_configuration

  head -c 128 /dev/urandom > "$folder/munge.key"
  chmod 600 "$folder/munge.key"
  # --force: the folder may lie below one that others can write to, such as /tmp.
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2> "$folder/munged.out" \
    || fail "munged does not start: $(tail -n 3 "$folder/munged.out")"
  slurmctld 2> "$folder/slurmctld.out" || fail "slurmctld does not start: $(tail -n 3 "$folder/slurmctld.out")"
  slurmd 2> "$folder/slurmd.out" || fail "slurmd does not start: $(tail -n 3 "$folder/slurmd.out")"

  for waited in $(seq 60); do
    if [ "$(sinfo --noheader --format=%t --partition=main 2> /dev/null)" = idle ]; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep .5
  done
  fail "the node did not become idle in $((waited / 2)) s: $(tail -n 3 "$folder/slurmctld.log" "$folder/slurmd.log")"
}

stop() {
  local name waited
  if [ -f "$SLURM_CONF" ]; then
    timeout 20 scancel --partition=main,urgent --me > /dev/null 2>&1 || true
    for waited in $(seq 30); do # a daemon that dies first leaves its jobs behind
      [ -n "$(timeout 5 squeue --noheader 2> /dev/null)" ] || break
      sleep .5
    done
  fi
  for name in slurmd slurmctld munged; do
    [ -f "$folder/$name.pid" ] && kill "$(cat "$folder/$name.pid")" 2> /dev/null || true
  done
  for waited in $(seq 40); do
    [ -f "$folder/slurmd.pid" ] || [ -f "$folder/slurmctld.pid" ] || [ -f "$folder/munged.pid" ] || break
    sleep .25
  done
}

case $1 in
  start) start || { stop; exit 1; } ;;
  stop) stop ;;
  *) fail "the first argument must be start or stop, got $1" ;;
esac
