#!/bin/sh
# Run a Python program on two hosts: network namespaces joined by a link of GBPS Gbit/s each way
# (0: not limited), with one rank and one core each. Needs root, iproute2 and two cores.
# usage: [LOSS=1] benchmarks/two_hosts.sh GBPS -m weft bench …     or a script in place of -m weft;
# with LOSS a host loses so many of 100 packets that arrive (needs nft)
set -eu
gbps=$1 python=${PYTHON:-.venv/bin/python} first=weft$$a second=weft$$b
shift

remove() {
  for host in $first $second; do
    ip netns pids $host 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns delete $host 2>/dev/null || true
  done
}
trap remove EXIT
trap 'exit 130' INT TERM

burst=$((gbps * 31250)) # bytes: packets are larger than on a wire before their segmentation
[ $burst -ge 73728 ] || burst=73728
ip netns add $first
ip netns add $second
ip -n $first link add eth0 type veth peer name eth0 netns $second
number=1
for host in $first $second; do
  ip -n $host address add 10.77.1.$number/24 dev eth0
  ip -n $host link set lo up
  ip -n $host link set eth0 up
  # BBR mistakes a core that computes for a slow link
  ip netns exec $host sysctl -qw net.ipv4.tcp_congestion_control=reno
  [ "$gbps" = 0 ] ||
    tc -n $host qdisc add dev eth0 root tbf rate "${gbps}gbit" burst $burst latency 50ms
  [ -z "${LOSS:-}" ] || ip netns exec $host nft "
    add table inet loss
    add chain inet loss arrival { type filter hook input priority 0; }
    add rule inet loss arrival iifname eth0 numgen random mod 100 < $LOSS drop"
  number=$((number + 1))
done

start() { # HOST NODE-RANK ARGUMENT …
  host=$1 node=$2
  shift 2
  GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 ip netns exec $host taskset -c "$node" \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node 1 \
    --master-addr 10.77.1.1 --master-port 29400 "$@"
}
# in the background, since a shell that waits answers signals at once
start $first 0 "$@" &
agent=$!
start $second 1 "$@" >/dev/null &
wait $agent && wait $!
