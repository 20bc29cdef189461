#!/bin/bash
# PostgreSQL on a spindle pool whose write log is on three nodes; the node that serves it dies, and
# then another one loses its network. No transaction may fail, and no committed row may be missing.
# See README.md beside this file.
#
#   cargo build --release && sudo examples/cluster/run.sh [OPTION]…
#
#   --store file|s3   a directory that the nodes share (default), or a MinIO that this script starts
#   --s3 URL          an existing s3://bucket/prefix; endpoint and credentials from the AWS_* variables
#   --client qemu|nbd the client of the disk: qemu-nbd (default), or the kernel's by spindle attach
#   --scale N         pgbench scale (5)             --clients N   (4)
#   --seconds N       of load before and after each failure (8)
#   --size SIZE       of the volume (4G)            --dir DIR     where everything goes (/var/tmp)
#   --spindle PATH    the binary (target/release/spindle)
#   --keep            leave files behind; namespaces, mounts and processes always go
set -euo pipefail

repository=$(realpath "$(dirname "$0")/../..")
store=file s3_url='' client=qemu scale=5 clients=4 seconds=8 size=4G dir=/var/tmp keep=''
spindle=$repository/target/release/spindle
postgres_bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
volume=db
nodes=(a b c)
nbd_port=10809 peer_port=7420 # each node has all ports of its namespace
wait_seconds=60               # longest wait for anything that a node does
ledger_clients=2

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
die() { printf 'run.sh: %s\n' "$*" >&2; exit 1; }

while [ $# -gt 0 ]; do
	case $1 in
	--store) store=$2; shift ;;
	--s3) store=s3 s3_url=$2; shift ;;
	--client) client=$2; shift ;;
	--scale) scale=$2; shift ;;
	--clients) clients=$2; shift ;;
	--seconds) seconds=$2; shift ;;
	--size) size=$2; shift ;;
	--dir) dir=$2; shift ;;
	--spindle) spindle=$(realpath "$2"); shift ;;
	--keep) keep=yes ;;
	*) sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
	esac
	shift
done

check_machine() {
	[ "$(id -u)" = 0 ] || die 'network namespaces and mounts need root: run it with sudo'
	[ -x "$spindle" ] || die "$spindle is not there; build it: cargo build --release"
	case $store in file | s3) ;; *) die "no such store: $store" ;; esac
	local missing=() pair needed=(ip:iproute2 nsenter:util-linux mkfs.ext4:e2fsprogs mount:mount
		"$postgres_bin/pg_amcheck:postgresql" "$postgres_bin/pgbench:postgresql")
	case $client in
	qemu)
		needed+=(qemu-nbd:qemu-utils nbdfuse:libnbd-bin losetup:mount)
		[ -c /dev/fuse ] || die 'no /dev/fuse: this kernel or container has no FUSE'
		;;
	nbd) [ -b /dev/nbd0 ] || die 'the kernel has no NBD client: modprobe nbd, or use --client qemu' ;;
	*) die "no such client: $client" ;;
	esac
	for pair in "${needed[@]}"; do
		command -v "${pair%:*}" >/dev/null || missing+=("${pair##*:}")
	done
	[ ${#missing[@]} = 0 ] || die "missing programs: apt-get install ${missing[*]}"
	id postgres >/dev/null 2>&1 || die 'no user postgres: apt-get install postgresql'
}

# --- what must be undone, whatever happens ---

work='' postgres_pid='' minio_pid='' disk='' client_pid='' fuse_pid='' network='' load_pids=()
declare -A node_pid=()

cleanup() {
	local status=$? pid
	trap '' INT TERM HUP
	trap - EXIT
	set +e
	[ -n "$work" ] || exit "$status"
	[ "$status" = 0 ] || show_logs
	# From below: with its disk gone nothing above it waits for an answer any more. After a run
	# that went well all of this is already done.
	force "$fuse_pid" "$client_pid"
	[ -z "$postgres_pid" ] || kill -QUIT "$postgres_pid" 2>/dev/null
	[ -z "$postgres_pid" ] || timeout 20 tail --pid="$postgres_pid" -f /dev/null || force "$postgres_pid"
	for pid in "$work"/bench/*/pid; do [ ! -e "$pid" ] || force "$(cat "$pid")"; done
	is_mounted "$work/mnt" && { wait_for 20 umount "$work/mnt" || umount -l "$work/mnt"; }
	case $disk in
	/dev/loop*) losetup -d "$disk" ;;
	/dev/nbd*) "$spindle" attach --cleanup "$disk" >/dev/null ;;
	esac
	is_mounted "$work/disk" && { wait_for 10 umount "$work/disk" || umount -l "$work/disk"; }
	force "${node_pid[@]}" "$minio_pid"
	remove_network
	# Never through a mount that would not go.
	if findmnt -rno TARGET | grep -q "^$work/"; then
		echo "run.sh: still mounted below $work: left as it is" >&2
	elif [ -z "$keep" ]; then
		rm -rf "$work"
	else
		echo "kept: $work"
	fi
	exit "$status"
}

show_logs() {
	local log
	for log in "$work"/log/*; do
		[ ! -s "$log" ] || { echo "--- ${log##*/}"; tail -n 12 "$log"; } >&2
	done
}

# force PID…: gone when it returns.
force() {
	local pid
	for pid in "$@"; do
		[ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && timeout 10 tail --pid="$pid" -f /dev/null
	done
}

# end PID: orderly, and with force after two minutes.
end() {
	[ -n "${1:-}" ] && kill -0 "$1" 2>/dev/null || return 0
	kill -TERM "$1" 2>/dev/null
	timeout 120 tail --pid="$1" -f /dev/null || { force "$1"; return 1; }
}

# wait_for SECONDS COMMAND…: until it succeeds.
wait_for() {
	local deadline=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $deadline ] || return 1
		sleep 0.05
	done
}

# --- the network: a bridge in a namespace of its own, with a cable to each node and to this machine ---

space() { echo "spindle-$$-$1"; }
# inside NODE COMMAND…: replaces the shell that calls it, so that its process id is the command's.
inside() { local of=$1; shift; exec nsenter --net="/run/netns/$(space "$of")" "$@"; }
uplink=spindle$$ # the end of the cable to this machine; at most 15 letters

address() { # NODE
	local number
	for number in "${!nodes[@]}"; do
		[ "${nodes[$number]}" != "$1" ] || echo "$subnet.$((number + 1))"
	done
}

# A subnet that this machine has no address and no route in.
free_subnet() {
	local number
	for number in $(shuf -i 64-255 -n 100); do
		ip -4 route show table all | grep -qF " 10.$number." || ip -4 route show table all | grep -qE "^10\.$number\." ||
			{ subnet=10.$number.0; return; }
	done
	die 'this machine has a route to every subnet of 10.0.0.0/8'
}

# plug NAMESPACE ADDRESS: a cable from the bridge to eth0 of the namespace.
plug() {
	ip -n "$(space switch)" link add "to-$1" type veth peer name eth0 netns "$(space "$1")"
	ip -n "$(space switch)" link set "to-$1" master bridge up
	ip -n "$(space "$1")" addr add "$2/24" dev eth0
	connect "$1"
}

connect() { # NODE
	ip -n "$(space "$1")" link set eth0 up
	ip -n "$(space "$1")" route replace default via "$subnet.254"
}
disconnect() { ip -n "$(space "$1")" link set eth0 down; } # NODE

make_network() {
	free_subnet
	network=yes
	local name
	for name in switch "${nodes[@]}"; do
		ip netns add "$(space "$name")"
		ip -n "$(space "$name")" link set lo up
	done
	ip -n "$(space switch)" link add bridge type bridge
	ip -n "$(space switch)" link set bridge up
	for name in "${nodes[@]}"; do plug "$name" "$(address "$name")"; done
	ip -n "$(space switch)" link add to-host type veth peer name "$uplink" netns $$
	ip -n "$(space switch)" link set to-host master bridge up
	ip addr add "$subnet.254/24" dev "$uplink"
	ip link set "$uplink" up
}

remove_network() {
	[ -n "$network" ] || return 0
	local name
	ip link del "$uplink" 2>/dev/null
	for name in "${nodes[@]}" switch; do ip netns del "$(space "$name")" 2>/dev/null; done
}

# --- the store and the nodes ---

start_store() {
	if [ -n "$s3_url" ]; then
		case ${AWS_ENDPOINT_URL:-} in *//localhost* | *//127.* | *'//[::1]'*)
			die "the nodes do not reach $AWS_ENDPOINT_URL: use another address of this machine" ;;
		esac
		store_url=${s3_url%/}/cluster-example-$(basename "$work")
	elif [ "$store" = file ]; then
		mkdir "$work/store"
		store_url=file://$work/store
	else
		start_minio
	fi
}

# The same place and version that examples/postgres uses.
start_minio() {
	local minio password
	minio=$(printf '%s\n' "${SPINDLE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spindle-tests}"/minio-*/minio | sort -V | tail -1)
	[ -x "$minio" ] || minio=$(command -v minio) || die 'no MinIO: examples/postgres/run.sh builds one'
	password=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
	mkdir -p "$work/s3/spindle" # a directory in MinIO's root is a bucket
	ip -n "$(space switch)" addr add "$subnet.253/24" dev bridge
	MINIO_ROOT_USER=spindle MINIO_ROOT_PASSWORD=$password MINIO_UPDATE=off inside switch "$minio" server --quiet \
		--address "$subnet.253:9000" --console-address "$subnet.253:9001" "$work/s3" >"$work/log/minio" 2>&1 &
	minio_pid=$!
	disown "$minio_pid"
	export AWS_ENDPOINT_URL=http://$subnet.253:9000 AWS_ALLOW_HTTP=true AWS_REGION=us-east-1
	export AWS_ACCESS_KEY_ID=spindle AWS_SECRET_ACCESS_KEY=$password
	store_url=s3://spindle/cluster
	wait_for 30 bash -c ": <>/dev/tcp/$subnet.253/9000" || die 'MinIO does not answer'
}

# ask NODE COMMAND…: a command of the program for the node.
ask() {
	local name=$1
	shift
	(inside "$name" "$spindle" "$@" --dir "$work/$name" --store "$store_url")
}

start_node() {
	: >"$work/ready-$1"
	# The network between the nodes is a cable of this script, so the clients need no TLS.
	inside "$1" "$spindle" serve --dir "$work/$1" --store "$store_url" --nbd "$(address "$1"):$nbd_port" \
		--allow-plain-remote --volume "$volume=$size" >"$work/ready-$1" 2>>"$work/log/node-$1" &
	node_pid[$1]=$!
	disown "${node_pid[$1]}" # the shell need not report that it was killed
	local deadline=$((SECONDS + wait_seconds))
	until grep -qx ready "$work/ready-$1"; do
		kill -0 "${node_pid[$1]}" 2>/dev/null || die "node $1 ended before it was ready"
		[ $SECONDS -lt $deadline ] || die "node $1 is not ready after $wait_seconds s"
		sleep 0.05
	done
}

kill_node() {
	kill -9 "${node_pid[$1]}"
	tail --pid="${node_pid[$1]}" -f /dev/null
}

# The part of docs/cluster.md, "Three machines".
found_cluster() {
	local first=${nodes[0]} name token
	token=$(ask "$first" node init --name "$first" --address "$(address "$first"):$peer_port" | token_in)
	start_node "$first"
	for name in "${nodes[@]:1}"; do
		mkdir "$work/$name"
		ask "$name" node join "$token" --name "$name" --address "$(address "$name"):$peer_port" >>"$work/log/join"
		start_node "$name"
		ask "$first" pool members add "$name" >>"$work/log/join"
		token=$(ask "$first" node token | token_in)
	done
	ask "$first" pool members list
}

token_in() { sed -n 's/^spindle node join \([^ ]*\) .*/\1/p'; }

# find_owner [EXCEPT]: sets owner to the node that serves the pool.
find_owner() {
	local deadline=$((SECONDS + wait_seconds)) name
	while [ $SECONDS -lt $deadline ]; do
		for name in "${nodes[@]}"; do
			[ "$name" != "${1:-}" ] || continue
			# Each node passes the question on to the owner.
			ask "$name" pool members list >"$work/members" 2>/dev/null || continue
			owner=$(awk '$2 == "owner" { print $1 }' "$work/members")
			[ -z "$owner" ] || [ "$owner" = "${1:-}" ] || return 0
		done
		sleep 0.1
	done
	die 'no node owns the pool'
}

# All members are connected and lack no batch: the table has a line for each of them.
is_caught_up() {
	ask "$owner" pool members list >"$work/members" 2>/dev/null || return 1
	[ "$(awk '($2 == "owner" || $2 == "member") && $3 == 0 && $NF == "connected"' "$work/members" | wc -l)" = ${#nodes[@]} ]
}

# --- the disk ---

# attach NODE: sets disk to a block device that outlives its connection to the pool.
attach() {
	mkdir -p "$work/mnt"
	case $client in nbd) attach_by_kernel ;; qemu) attach_by_qemu "$1" ;; esac
}

# By spindle and the kernel's client, with all addresses: it changes to the next one when a
# connection ends.
attach_by_kernel() {
	local name uris=()
	for name in "${nodes[@]}"; do uris+=("nbd://$(address "$name"):$nbd_port/$volume"); done
	disk_uri=$(IFS=,; echo "${uris[*]}")
	: >"$work/attached"
	"$spindle" attach --nbd "$disk_uri" >"$work/attached" 2>>"$work/log/attach" &
	client_pid=$!
	disown "$client_pid"
	wait_for 30 grep -qx ready "$work/attached" || die 'the kernel has no device of the volume'
	disk=$(head -1 "$work/attached")
}

# Without the kernel's client: one node <- qemu-nbd, which connects again and repeats what has no answer <- nbdfuse <-
# loop device. Direct I/O in every layer, so that nothing is cached below the file system.
attach_by_qemu() {
	local socket=$work/qemu.sock
	client_node=$1
	qemu-nbd --image-opts -t -e 8 -k "$socket" --discard=unmap --cache=none \
		"driver=nbd,server.type=inet,server.host=$(address "$1"),server.port=$nbd_port,export=$volume,reconnect-delay=300" \
		>>"$work/log/qemu-nbd" 2>&1 &
	client_pid=$!
	disown "$client_pid"
	wait_for 20 test -S "$socket" || die 'qemu-nbd does not start'
	: >>"$work/disk"
	nbdfuse -C 4 "$work/disk" "nbd+unix:///?socket=$socket" </dev/null >>"$work/log/nbdfuse" 2>&1 &
	fuse_pid=$!
	disown "$fuse_pid"
	wait_for 20 is_mounted "$work/disk" || die 'nbdfuse does not start'
	disk=$(losetup --direct-io=on -f --show "$work/disk")
}

detach() {
	# The last process that has a file open may need a moment to end.
	wait_for 20 umount "$work/mnt" || die 'the disk does not unmount'
	if [ "$client" = nbd ]; then
		"$spindle" detach "$disk_uri" >>"$work/log/attach"
	else
		losetup -d "$disk"
		# The kernel lets go of the file a moment after losetup returns.
		wait_for 10 umount "$work/disk" || die 'nbdfuse does not unmount'
		timeout 30 tail --pid="$fuse_pid" -f /dev/null || die 'nbdfuse does not end'
		fuse_pid=''
	fi
	end "$client_pid" || die 'the client of the disk does not end'
	disk='' client_pid=''
}

# From the table: asking the mount itself fails once its server is dead.
is_mounted() { grep -qF " $1 " /proc/self/mountinfo; }

# --- PostgreSQL ---

as_postgres() { (cd / && exec runuser -u postgres -- "$@"); }
on() { as_postgres env PGHOST="$work/run" PGDATABASE=postgres "$@"; }
sql() { on "$postgres_bin/psql" -XAtqc "$1"; }

postgres_init() {
	data=$work/mnt/data
	mkdir -p "$data" "$work/run"
	chown postgres: "$data" "$work/run"
	chmod 700 "$data"
	as_postgres "$postgres_bin/initdb" --data-checksums --auth=peer -D "$data" >"$work/log/initdb" 2>&1
	# Only where it listens; everything else is as packaged.
	printf "listen_addresses = ''\nunix_socket_directories = '%s'\n" "$work/run" >>"$data/postgresql.conf"
	sync -f "$data/postgresql.conf"
}

postgres_start() {
	: >>"$work/log/postgres"
	chown postgres: "$work/log/postgres"
	as_postgres "$postgres_bin/pg_ctl" start -w -t 300 -s -D "$data" -l "$work/log/postgres" \
		>>"$work/log/pg_ctl" 2>&1 || die 'PostgreSQL does not start'
	postgres_pid=$(head -1 "$data/postmaster.pid")
}

postgres_stop() {
	kill -INT "$postgres_pid"
	timeout 300 tail --pid="$postgres_pid" -f /dev/null || die 'PostgreSQL does not stop'
	postgres_pid=''
}

# bench LABEL ARGUMENT…: pgbench with a log of every confirmed transaction.
bench() {
	local label=$1
	shift
	mkdir -p "$work/bench/$label"
	chmod 777 "$work/bench/$label"
	(cd "$work/bench/$label" && exec runuser -u postgres -- env PGHOST="$work/run" PGDATABASE=postgres \
		bash -c 'echo $$ >pid; exec "$@"' bash "$postgres_bin/pgbench" -n -l --log-prefix=log "$@" >out 2>err)
}

# The ledger: each client writes 1, 2, 3, … one transaction each, so that its log, which has a line
# a confirmed transaction, says exactly which numbers must be there.
make_ledger() {
	sql 'CREATE TABLE ledger (run text, client int, number bigint, PRIMARY KEY (run, client, number))'
	printf '%s\n' '\set number :number + 1' \
		"INSERT INTO ledger VALUES (':run', :client_id, :number);" >"$work/ledger.sql"
}

# start_load RUN: TPC-B and the ledger at once, until stop_load.
start_load() {
	sed "s/:run/$1/" "$work/ledger.sql" >"$work/ledger-$1.sql"
	bench "$1-tpcb" -c "$clients" -j 2 -T 3600 &
	load_pids=($!)
	bench "$1-ledger" -c $ledger_clients -j 1 -T 3600 -D number=0 -f "$work/ledger-$1.sql" &
	load_pids+=($!)
	sleep "$seconds"
}

# stop_load RUN: pgbench ends its run in order at SIGALRM, its own timer.
stop_load() {
	local kind pid
	load_failed_count=0
	for kind in tpcb ledger; do
		pid=$(cat "$work/bench/$1-$kind/pid")
		kill -ALRM "$pid" 2>/dev/null || load_failed_count=$((load_failed_count + 1))
		timeout "$wait_seconds" tail --pid="$pid" -f /dev/null || die "pgbench does not end in run $1"
	done
	for pid in "${load_pids[@]}"; do
		wait "$pid" || load_failed_count=$((load_failed_count + 1))
	done
	load_pids=()
}

# confirmed_since RUN TIME: transactions that the server has confirmed after a time.
confirmed_since() { cat "$work/bench/$1"-*/log.* | awk -v at="$2" '$5 + $6 / 1e6 > at' | wc -l; }
is_confirming() { [ "$(confirmed_since "$1" "$2")" -gt 100 ]; }

# pause RUN TIME: seconds from the last confirmation before the longest gap that ends after TIME to
# the first one behind it.
pause() {
	cat "$work/bench/$1"-*/log.* | awk '{printf "%.6f\n", $5 + $6 / 1e6}' | sort -n | awk -v at="$2" '
		NR > 1 && $1 > at && $1 - last > longest {longest = $1 - last}
		{last = $1}
		END {printf "%.1f", longest}'
}

now() { date +%s.%N; }

# --- what must be true afterwards ---

failed_count=0
check() { # TITLE COMMAND…
	local title=$1
	shift
	if "$@" >"$work/log/check" 2>&1; then
		printf '  ok      %s\n' "$title"
	else
		printf '  FAILED  %s\n' "$title"
		tail -n 5 "$work/log/check"
		failed_count=$((failed_count + 1))
	fi
}

every_confirmed_row() { # RUN
	local number count found
	for ((number = 0; number < ledger_clients; number++)); do
		count=$(cat "$work/bench/$1-ledger"/log.* | awk -v client="$number" '$1 == client' | wc -l)
		found=$(sql "SELECT count(*) FILTER (WHERE number <= $count) || ' ' || coalesce(max(number), 0)
			FROM ledger WHERE run = '$1' AND client = $number")
		echo "client $number: $count confirmed, found and last: $found"
		# The last one may have been committed without the client hearing of it.
		[ "${found% *}" = "$count" ] && [ "${found#* }" -le $((count + 1)) ] && [ "$count" -gt 0 ] || return 1
	done
}

balances_agree() {
	[ "$(sql 'SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history)
		AND (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(delta) FROM pgbench_history)
		AND (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(delta) FROM pgbench_history)')" = t ]
}

noticed_only_a_pause() { # RUN
	[ "$load_failed_count" = 0 ] || { cat "$work/bench/$1"-*/err; return 1; }
	! grep -E 'number of failed transactions: [1-9]' "$work/bench/$1"-*/out || return 1
	! grep -E 'PANIC|FATAL|ERROR' "$work/log/postgres"
}

# --- the failures ---

# fail RUN TITLE FAILURE REPAIR: the load runs, the owner fails, another node takes over, the owner
# comes back as a member.
fail() {
	local run=$1 title=$2 failure=$3 repair=$4 failed_at victim
	find_owner
	victim=$owner
	start_load "$run"
	say "$title: node $victim owns the pool"
	failed_at=$(now)
	"$failure" "$victim"
	wait_for "$wait_seconds" is_confirming "$run" "$(awk -v at="$failed_at" 'BEGIN {printf "%.6f", at + 0.5}')" ||
		die "$title: no transaction is confirmed $wait_seconds s later"
	find_owner "$victim"
	say "$title: node $owner owns the pool"
	sleep "$seconds"
	"$repair" "$victim"
	wait_for "$wait_seconds" is_caught_up || { cat "$work/members"; die "node $victim does not catch up"; }
	say "node $victim is a member again, and has caught up:"
	cat "$work/members"
	sleep 1
	stop_load "$run"
	printf '%-36s %5s s without a confirmed transaction, %6s before and after it\n' "$title" \
		"$(pause "$run" "$failed_at")" "$(confirmed_since "$run" 0)" | tee -a "$work/report"
	check 'PostgreSQL noticed a pause only' noticed_only_a_pause "$run"
	check 'every transaction that was confirmed is there' every_confirmed_row "$run"
}

# move_away: qemu-nbd knows one node. The next failure must not hit that one, so the pool moves.
move_away() {
	find_owner
	[ "$client" = qemu ] && [ "$owner" = "$client_node" ] || return 0
	local name
	for name in "${nodes[@]}"; do [ "$name" = "$client_node" ] || break; done
	say "the pool moves to node $name by hand"
	ask "$name" pool take-over
	find_owner "$client_node"
	wait_for "$wait_seconds" is_caught_up || die 'a member does not catch up'
}

main() {
	check_machine
	trap cleanup EXIT
	trap 'exit 130' INT TERM HUP
	mkdir -p "$dir"
	work=$(mktemp -d "$(realpath "$dir")/spindle-cluster.XXXXXX")
	mkdir "$work/log" "$work/run" "$work/bench"
	chmod 711 "$work" "$work/run" "$work/log" "$work/bench"
	: >"$work/report"
	make_network
	start_store
	found_cluster
	say "three nodes serve $volume ($size) from $store_url"
	attach "${nodes[2]}"
	mkfs.ext4 -q -F "$disk"
	mount "$disk" "$work/mnt"
	postgres_init
	postgres_start
	say "pgbench -i, scale $scale"
	on "$postgres_bin/pgbench" -i -q -s "$scale" >"$work/log/pgbench-init" 2>&1
	make_ledger
	fail kill 'the owner is killed' kill_node start_node
	move_away
	fail cut 'the owner loses its network' disconnect connect
	check 'the balances of TPC-B agree' balances_agree
	say 'all of it once more, read from the pool by way of another node'
	postgres_stop
	detach
	attach "${nodes[0]}"
	mount "$disk" "$work/mnt"
	postgres_start
	check 'every transaction of the first run is there' every_confirmed_row kill
	check 'every transaction of the second run is there' every_confirmed_row cut
	check 'pg_amcheck, heap against indexes' on "$postgres_bin/pg_amcheck" -a --install-missing --heapallindexed
	postgres_stop
	check 'pg_checksums' as_postgres "$postgres_bin/pg_checksums" --check -D "$data"
	detach
	# The owner first: it needs the others to the end.
	find_owner
	local name status=0
	for name in "$owner" "${nodes[@]}"; do
		end "${node_pid[$name]}" || die "node $name does not stop"
	done
	node_pid=()
	check 'spindle fsck' ask "$owner" fsck
	echo
	cat "$work/report"
	[ $failed_count = 0 ] || { echo "$failed_count checks FAILED"; status=1; }
	exit $status
}

main
