#!/bin/bash
# PostgreSQL on ext4 on a spindle volume whose data lives in an S3 bucket; the daemon is killed
# with -9 under load and nothing that was committed may be missing. See README.md beside this file.
#
#   cargo build --release && sudo examples/postgres/run.sh [OPTION]…
#
#   --store s3|file   s3 starts a MinIO on this machine (default); file is a local directory
#   --s3 URL          an existing s3://bucket/prefix instead; credentials from the AWS_* variables
#   --variant reconnect|remount|both   what the client of the disk does after the kill (both)
#   --compare         no kill: pgbench on spindle, on nbdkit file and on a plain local directory
#   --published       no kill: pgbench -c 50 -j 15, read-write and -S, synchronous_commit on and off
#   --scale N         pgbench scale (50)            --clients N   (8)
#   --seconds N       length of one load (60)       --runs N      of --compare, --published (3, 1)
#   --smoke           scale 2 and 8 seconds: does it work at all
#   --size SIZE       of the volume (20G)           --dir DIR     where everything goes (/var/tmp)
#   --spindle PATH    the binary (target/release/spindle)
#   --keep            leave files behind; mounts and processes always go
set -euo pipefail

repository=$(realpath "$(dirname "$0")/../..")
store=s3 s3_url='' variant=both mode=kill scale=50 clients=8 seconds=60 runs='' size=20G dir=/var/tmp
spindle=$repository/target/release/spindle keep='' jobs=2
postgres_bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
volume=db
down_seconds=2 # how long the killed daemon stays away

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
die() { printf 'run.sh: %s\n' "$*" >&2; exit 1; }

while [ $# -gt 0 ]; do
	case $1 in
	--store) store=$2; shift ;;
	--s3) store=s3 s3_url=$2; shift ;;
	--variant) variant=$2; shift ;;
	--compare | --published) mode=${1#--} ;;
	--scale) scale=$2; shift ;;
	--clients) clients=$2; shift ;;
	--seconds) seconds=$2; shift ;;
	--runs) runs=$2; shift ;;
	--smoke) scale=2 seconds=8 ;;
	--size) size=$2; shift ;;
	--dir) dir=$2; shift ;;
	--spindle) spindle=$(realpath "$2"); shift ;;
	--keep) keep=yes ;;
	*) sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
	esac
	shift
done

check_machine() {
	[ "$(id -u)" = 0 ] || die 'mounting needs root: run it with sudo'
	[ -x "$spindle" ] || die "$spindle is not there; build it: cargo build --release"
	[ -c /dev/fuse ] || die 'no /dev/fuse: this kernel or container has no FUSE'
	local missing=() pair
	for pair in nbdfuse:libnbd-bin nbdkit:nbdkit losetup:mount mkfs.ext4:e2fsprogs \
		"$postgres_bin/pg_amcheck:postgresql" "$postgres_bin/pgbench:postgresql"; do
		command -v "${pair%:*}" >/dev/null || missing+=("${pair##*:}")
	done
	[ ${#missing[@]} = 0 ] || die "missing programs: apt-get install ${missing[*]}"
	id postgres >/dev/null 2>&1 || die 'no user postgres: apt-get install postgresql'
	case $variant in reconnect | remount | both) ;; *) die "no such variant: $variant" ;; esac
	case $store in s3 | file) ;; *) die "no such store: $store" ;; esac
}

# --- what must be undone, whatever happens ---

work='' spindle_pid='' minio_pid=''
declare -A fuse_pid=() loop=() proxy_pid=() data_at=() postgres_pid=()

cleanup() {
	local status=$? name
	trap '' INT TERM HUP
	trap - EXIT
	set +e
	[ -n "$work" ] || exit "$status"
	[ "$status" = 0 ] || show_logs
	# From below: with its disk gone nothing above it waits for an answer any more. After a run
	# that went well all of this is already done.
	for name in "${!fuse_pid[@]}"; do force "${proxy_pid[$name]:-}" "${fuse_pid[$name]}"; done
	for name in "${!proxy_pid[@]}"; do force "${proxy_pid[$name]}"; done
	for name in "${!postgres_pid[@]}"; do kill -QUIT "${postgres_pid[$name]}"; done 2>/dev/null
	for name in "${!postgres_pid[@]}"; do
		timeout 20 tail --pid="${postgres_pid[$name]}" -f /dev/null || force "${postgres_pid[$name]}"
	done
	for name in "${!fuse_pid[@]}"; do detach_by_force "$name"; done
	force "$spindle_pid"
	end "$minio_pid"
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

# force PID…: gone when it returns.
force() {
	local pid
	for pid in "$@"; do
		[ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && timeout 10 tail --pid="$pid" -f /dev/null
	done
}

show_logs() {
	local log
	for log in "$work"/log/*; do
		[ ! -s "$log" ] || { echo "--- ${log##*/}"; tail -n 8 "$log"; } >&2
	done
}

# end PID: orderly, and with force after 30 seconds.
end() {
	[ -n "${1:-}" ] && kill -0 "$1" 2>/dev/null || return 0
	kill -TERM "$1" 2>/dev/null
	timeout 30 tail --pid="$1" -f /dev/null || kill -9 "$1" 2>/dev/null
	wait "$1" 2>/dev/null || true
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

# --- the store and the daemon ---

free_port() {
	local port
	for port in $(shuf -i 20000-32000 -n 100); do
		(: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
	done
	die 'no free port'
}

# The same place and version that tests/run uses.
minio_version=v0.0.0-20260212201848-7aac2a2c5b7c
find_minio() {
	local cache=${SPINDLE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spindle-tests}/minio-$minio_version
	minio=$cache/minio
	[ ! -x "$minio" ] || return 0
	minio=$(command -v minio) && return
	minio=$cache/minio
	command -v go >/dev/null || die 'no MinIO and no Go to build it with: use --store file, or install one'
	say 'building MinIO into the cache (some minutes, once)'
	mkdir -p "$cache"
	GOBIN=$work/go go install "github.com/minio/minio@$minio_version" >"$work/log/go-install" 2>&1 ||
		die 'MinIO does not build: use --store file'
	mv "$work/go/minio" "$minio"
}

start_store() {
	if [ "$store" = file ]; then
		store_url=file://$work/store
		mkdir "$work/store"
		return
	elif [ -n "$s3_url" ]; then
		store_url=${s3_url%/}/postgres-example-$(basename "$work")
		return
	fi
	find_minio
	local port password
	port=$(free_port) password=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
	mkdir -p "$work/s3/spindle" # a directory in MinIO's root is a bucket
	MINIO_ROOT_USER=spindle MINIO_ROOT_PASSWORD=$password MINIO_UPDATE=off "$minio" server --quiet \
		--address "127.0.0.1:$port" --console-address "127.0.0.1:$(free_port)" "$work/s3" \
		>"$work/log/minio" 2>&1 &
	minio_pid=$!
	export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_ALLOW_HTTP=true AWS_REGION=us-east-1
	export AWS_ACCESS_KEY_ID=spindle AWS_SECRET_ACCESS_KEY=$password
	store_url=s3://spindle/postgres
	wait_for 30 bash -c ": <>/dev/tcp/127.0.0.1/$port" || die 'MinIO does not answer'
}

start_spindle() {
	: >"$work/ready"
	"$spindle" serve --dir "$work/pool" --store "$store_url" --nbd-unix "$work/nbd.sock" \
		--volume "$volume=$size" >"$work/ready" 2>>"$work/log/spindle" &
	spindle_pid=$!
	disown "$spindle_pid" # the shell need not report that it was killed
	local deadline=$((SECONDS + 60))
	until grep -qx ready "$work/ready"; do
		kill -0 "$spindle_pid" 2>/dev/null || die 'spindle ended before it was ready'
		[ $SECONDS -lt $deadline ] || die 'spindle is not ready after 60 s'
		sleep 0.05
	done
}

kill_spindle() {
	kill -9 "$spindle_pid"
	tail --pid="$spindle_pid" -f /dev/null
}

spindle_uri="nbd+unix:///$volume?socket=WORK/nbd.sock"

# start_proxy NAME URI: a client that reconnects. nbdkit repeats what was not answered.
start_proxy() {
	nbdkit -f -U "$work/$1-proxy.sock" --filter=retry nbd uri="$2" \
		retries=300 retry-delay=1 retry-exponential=no >>"$work/log/$1-proxy" 2>&1 &
	proxy_pid[$1]=$!
	disown "${proxy_pid[$1]}"
	wait_for 20 test -S "$work/$1-proxy.sock" || die "the proxy does not start"
}

# --- the disk: NBD server <- nbdfuse <- loop device <- ext4 ---

# attach NAME URI: the loop device is ${loop[NAME]} then. Direct I/O in every layer, so that
# nothing is cached below the file system.
attach() {
	local name=$1 uri=$2
	mkdir -p "$work/$name"
	: >>"$work/$name.disk"
	nbdfuse -C 4 "$work/$name.disk" "$uri" </dev/null >>"$work/log/$name-nbdfuse" 2>&1 &
	fuse_pid[$name]=$!
	disown "${fuse_pid[$name]}"
	wait_for 20 is_mounted "$work/$name.disk" || die "nbdfuse does not reach $uri"
	loop[$name]=$(losetup --direct-io=on -f --show "$work/$name.disk")
}

mount_disk() { mount "${loop[$1]}" "$work/$1"; }

detach() {
	local name=$1
	if is_mounted "$work/$name"; then
		# The last process that has a file open may need a moment to end.
		wait_for 20 umount "$work/$name" || return 1
	fi
	if [ -n "${loop[$name]:-}" ]; then
		losetup -d "${loop[$name]}"
		# The kernel lets go of the file a moment after losetup returns.
		wait_for 10 is_loop_free "${loop[$name]}" || return 1
		unset "loop[$name]"
	fi
	if is_mounted "$work/$name.disk"; then
		wait_for 10 umount "$work/$name.disk" || return 1
	fi
	# It has sent its disconnect once it is gone.
	timeout 30 tail --pid="${fuse_pid[$name]}" -f /dev/null || return 1
	unset "fuse_pid[$name]"
	if [ -n "${proxy_pid[$name]:-}" ]; then
		end "${proxy_pid[$name]}"
		rm -f "$work/$name-proxy.sock"
		unset "proxy_pid[$name]"
	fi
}

# From the table: asking the mount itself fails once its server is dead.
is_mounted() { grep -qF " $1 " /proc/self/mountinfo; }

is_loop_free() { ! losetup "$1" 2>/dev/null | grep -q .; }

detach_by_force() { # NAME, whose nbdfuse is dead
	is_mounted "$work/$1" && { wait_for 20 umount "$work/$1" || umount -l "$work/$1"; }
	[ -z "${loop[$1]:-}" ] || losetup -d "${loop[$1]}"
	is_mounted "$work/$1.disk" && { wait_for 10 umount "$work/$1.disk" || umount -l "$work/$1.disk"; }
}

# --- PostgreSQL, one server a name; its socket is in $work/run/NAME ---

as_postgres() { (cd / && exec runuser -u postgres -- "$@"); }
on() { local name=$1; shift; as_postgres env PGHOST="$work/run/$name" PGDATABASE=postgres "$@"; }
sql() { on "$1" "$postgres_bin/psql" -XAtqc "$2"; }

postgres_init() { # NAME DIRECTORY
	mkdir -p "$2/data" "$work/run/$1"
	chown postgres: "$2/data" "$work/run/$1"
	chmod 700 "$2/data"
	as_postgres "$postgres_bin/initdb" --data-checksums --auth=peer -D "$2/data" >"$work/log/initdb" 2>&1
	# Only where it listens; everything else is as packaged.
	printf "listen_addresses = ''\nunix_socket_directories = '%s'\n" "$work/run/$1" \
		>>"$2/data/postgresql.conf"
	# initdb synced what it wrote; this line would not survive the loss of the disk without it.
	sync -f "$2/data/postgresql.conf"
	data_at[$1]=$2/data
}

postgres_start() {
	: >>"$work/log/postgres-$1"
	chown postgres: "$work/log/postgres-$1"
	as_postgres "$postgres_bin/pg_ctl" start -w -t 300 -s -D "${data_at[$1]}" -l "$work/log/postgres-$1" \
		>>"$work/log/pg_ctl" 2>&1 || die "PostgreSQL on $1 does not start"
	postgres_pid[$1]=$(head -1 "${data_at[$1]}/postmaster.pid")
}

postgres_stop() { # NAME [MODE]
	local pid=${postgres_pid[$1]:-}
	[ -n "$pid" ] || return 0
	# By signal: pg_ctl would read a directory that may not be readable any more.
	case ${2:-fast} in fast) kill -INT "$pid" ;; *) kill -QUIT "$pid" ;; esac 2>/dev/null || true
	timeout 300 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
	unset "postgres_pid[$1]"
}

# --- the load ---

# bench NAME LABEL ARGUMENT…: pgbench with a log of every confirmed transaction.
bench() {
	local name=$1 label=$2
	shift 2
	mkdir -p "$work/bench/$label"
	chmod 777 "$work/bench/$label"
	(cd "$work/bench/$label" && runuser -u postgres -- env PGHOST="$work/run/$name" PGDATABASE=postgres \
		"$postgres_bin/pgbench" -n -l --log-prefix=log "$@" >out 2>err)
}

# confirmed LABEL: transactions that the server confirmed to the client.
confirmed() { cat "$work/bench/$1"/log.* | wc -l; }

# latency LABEL: "p50 p99 longest" in milliseconds, from the log.
latency() {
	cat "$work/bench/$1"/log.* | awk '{print $3}' | sort -n | awk '
		{us[NR] = $1}
		END {if (NR) printf "%.2f %.2f %.0f", us[int((NR + 1) / 2)] / 1000, us[int(NR * .99 + .99)] / 1000, us[NR] / 1000}'
}

tps() { awk '/^tps = /{printf "%.0f", $3}' "$work/bench/$1/out"; }

report() { # LABEL TITLE
	local numbers
	read -ra numbers <<<"$(latency "$1")"
	printf '%-44s %8s tps   p50 %s ms   p99 %s ms   longest %s ms\n' \
		"$2" "$(tps "$1")" "${numbers[@]}" | tee -a "$work/report"
}

# The ledger: each client writes 1, 2, 3, … one transaction each, so that its log, which has a line
# a confirmed transaction, says exactly which numbers must be there.
make_ledger() {
	sql spindle 'CREATE TABLE ledger (run text, client int, number bigint, PRIMARY KEY (run, client, number))'
	printf '%s\n' '\set number :number + 1' \
		"INSERT INTO ledger VALUES (':run', :client_id, :number);" >"$work/ledger.sql"
}

ledger_clients=4

# load_with_kill RUN: TPC-B and the ledger at once; the daemon dies in the middle.
load_with_kill() {
	local run=$1 tpcb ledger
	history_before=$(sql spindle 'SELECT count(*) FROM pgbench_history')
	bench spindle "$run-tpcb" -c "$clients" -j "$jobs" -T "$seconds" & tpcb=$!
	sed "s/:run/$run/" "$work/ledger.sql" >"$work/ledger-$run.sql"
	bench spindle "$run-ledger" -c $ledger_clients -j 1 -T "$seconds" -D number=0 \
		-f "$work/ledger-$run.sql" & ledger=$!
	sleep $((seconds / 2))
	kill_spindle
	say 'spindle: killed with -9 under load'
	sleep $down_seconds
	if [ "$run" = reconnect ]; then
		start_spindle
		say 'spindle: started again; the client reconnects'
	fi
	load_failed_count=0
	wait $tpcb || load_failed_count=$((load_failed_count + 1))
	wait $ledger || load_failed_count=$((load_failed_count + 1))
}

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
	local client count found
	for ((client = 0; client < ledger_clients; client++)); do
		count=$(cat "$work/bench/$1-ledger"/log.* | awk -v client=$client '$1 == client' | wc -l)
		found=$(sql spindle "SELECT count(*) FILTER (WHERE number <= $count) || ' ' || max(number)
			FROM ledger WHERE run = '$1' AND client = $client")
		echo "client $client: $count confirmed, found and last: $found"
		# The last one may have been committed without the client hearing of it.
		[ "${found% *}" = "$count" ] && [ "${found#* }" -le $((count + 1)) ] && [ "$count" -gt 0 ] || return 1
	done
}

history_is_whole() { # RUN
	local rows least
	least=$((history_before + $(confirmed "$1-tpcb")))
	rows=$(sql spindle 'SELECT count(*) FROM pgbench_history')
	echo "history: $rows rows, $least to $((least + clients)) expected"
	[ "$rows" -ge "$least" ] && [ "$rows" -le $((least + clients)) ]
}

balances_agree() {
	local sums
	sums=$(sql spindle 'SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history)
		AND (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(delta) FROM pgbench_history)
		AND (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(delta) FROM pgbench_history)')
	[ "$sums" = t ]
}

noticed_only_a_pause() {
	[ "$load_failed_count" = 0 ] || { cat "$work"/bench/reconnect-*/err; return 1; }
	! grep -E 'PANIC|FATAL|ERROR' "$work/log/postgres-spindle"
}

check_all() { # RUN
	check 'every transaction that was confirmed is there (ledger)' every_confirmed_row "$1"
	check 'every transaction that was confirmed is there (TPC-B history)' history_is_whole "$1"
	check 'the balances of TPC-B agree' balances_agree
	check 'pg_amcheck, heap against indexes' on spindle "$postgres_bin/pg_amcheck" -a --install-missing --heapallindexed
	postgres_stop spindle
	check 'pg_checksums' as_postgres "$postgres_bin/pg_checksums" --check -D "${data_at[spindle]}"
}

# --- the two variants ---

variant_reconnect() {
	say 'variant 1: a client that reconnects'
	bench spindle plain -c "$clients" -j "$jobs" -T "$seconds" || die "pgbench: $(tail -1 "$work/bench/plain/err")"
	report plain "$clients clients, undisturbed"
	load_with_kill reconnect
	report reconnect-tpcb "$clients clients and the ledger, daemon killed"
	check 'PostgreSQL noticed a pause only' noticed_only_a_pause
	check_all reconnect
}

variant_remount() {
	say 'variant 2: a client that does not reconnect'
	load_with_kill remount
	postgres_stop spindle immediate
	detach spindle || die 'the dead disk does not unmount'
	start_spindle
	attach spindle "$spindle_uri"
	mount_disk spindle
	say 'mounted again; PostgreSQL recovers from the crash'
	postgres_start spindle
	report remount-tpcb "$clients clients and the ledger, until the kill"
	check_all remount
}

run_variants() {
	spindle_uri=${spindle_uri/WORK/$work}
	local first=$spindle_uri
	if [ "$variant" != remount ]; then
		start_proxy spindle "$spindle_uri"
		first="nbd+unix:///?socket=$work/spindle-proxy.sock"
	fi
	attach spindle "$first"
	mkfs.ext4 -q -F "${loop[spindle]}"
	mount_disk spindle
	postgres_init spindle "$work/spindle"
	postgres_start spindle
	say "pgbench -i, scale $scale"
	on spindle "$postgres_bin/pgbench" -i -q -s "$scale" >"$work/log/pgbench-init" 2>&1
	make_ledger
	[ "$variant" = remount ] || variant_reconnect
	if [ "$variant" = both ]; then
		detach spindle || die 'the disk does not unmount'
		attach spindle "$spindle_uri"
		mount_disk spindle
		postgres_start spindle
	fi
	[ "$variant" = reconnect ] || variant_remount
	database_bytes=$(du -sb "${data_at[spindle]}" | cut -f1)
	detach spindle || die 'the disk does not unmount'
}

# --- side by side ---

start_columns() {
	spindle_uri=${spindle_uri/WORK/$work}
	truncate -s "$size" "$work/nbdkit.img"
	nbdkit -f -U "$work/nbdkit-proxy.sock" file "$work/nbdkit.img" >"$work/log/nbdkit" 2>&1 &
	proxy_pid[nbdkit]=$!
	disown "${proxy_pid[nbdkit]}"
	wait_for 20 test -S "$work/nbdkit-proxy.sock" || die 'nbdkit does not start'
	attach spindle "$spindle_uri"
	attach nbdkit "nbd+unix:///?socket=$work/nbdkit-proxy.sock"
	mkdir "$work/local"
	local name
	for name in "${columns[@]}"; do
		if [ "$name" != local ]; then
			mkfs.ext4 -q -F "${loop[$name]}"
			mount_disk "$name"
		fi
		postgres_init "$name" "$work/$name"
		postgres_start "$name"
		say "pgbench -i, scale $scale, on $name"
		on "$name" "$postgres_bin/pgbench" -i -q -s "$scale" >"$work/log/pgbench-init" 2>&1
		sql "$name" CHECKPOINT
	done
}

median() { sort -n | awk '{v[NR] = $1} END {print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2}'; }

# side_by_side TITLE SYNCHRONOUS_COMMIT ARGUMENT…: interleaved runs, a line of the table.
side_by_side() {
	local title=$1 sync=$2 run name label line local_tps value p99
	shift 2
	for ((run = 1; run <= runs; run++)); do
		for name in "${columns[@]}"; do
			label=${title// /-}-$name-$run
			PGOPTIONS="-c synchronous_commit=$sync" bench "$name" "$label" "$@" -T "$seconds" ||
				die "pgbench on $name: $(tail -1 "$work/bench/$label/err")"
			tps "$label" >>"$work/bench/${title// /-}-$name.tps"
			echo >>"$work/bench/${title// /-}-$name.tps"
			latency "$label" | cut -d' ' -f2 >>"$work/bench/${title// /-}-$name.p99"
			rm -f "$work/bench/$label"/log.*
		done
	done
	local_tps=$(median <"$work/bench/${title// /-}-local.tps")
	line=$(printf '%-34s' "$title")
	for name in "${columns[@]}"; do
		value=$(median <"$work/bench/${title// /-}-$name.tps")
		p99=$(median <"$work/bench/${title// /-}-$name.p99")
		line+=$(awk -v v="$value" -v l="$local_tps" -v p="$p99" 'BEGIN {printf "%9.0f tps %8.2f ms %5.2fx", v, p, v / l}')
	done
	echo "$line" | tee -a "$work/report"
}

run_side_by_side() {
	columns=(local nbdkit spindle)
	start_columns
	printf '%-34s%29s%29s%29s\n' 'tps, p99, share of local' 'plain local directory' 'nbdkit file' spindle |
		tee -a "$work/report"
	if [ "$mode" = compare ]; then
		: "${runs:=3}"
		side_by_side "read-write, $clients clients" on -c "$clients" -j "$jobs"
	else
		: "${runs:=1}"
		local sync
		for sync in on off; do
			side_by_side "-c 50 -j 15, sync $sync, read-write" $sync -c 50 -j 15
			side_by_side "-c 50 -j 15, sync $sync, -S" $sync -c 50 -j 15 -S
		done
	fi
	database_bytes=$(du -sb "${data_at[spindle]}" | cut -f1)
	local name
	for name in "${columns[@]}"; do
		postgres_stop "$name"
		[ "$name" = local ] || detach "$name" || die "the disk of $name does not unmount"
	done
}

# --- the end ---

bucket() {
	local objects bytes
	if [ "$store" = file ]; then
		objects=$(find "$work/store" -type f | wc -l) bytes=$(du -sb "$work/store" | cut -f1)
	elif [ -z "$s3_url" ]; then
		# MinIO keeps an object as a directory with a file xl.meta.
		objects=$(find "$work/s3/spindle" -name xl.meta | wc -l) bytes=$(du -sb "$work/s3/spindle" | cut -f1)
	else
		echo "the bucket: see $store_url"
		return
	fi
	printf 'the bucket holds %d objects, %d MiB; the database directory is %d MiB\n' \
		"$objects" $((bytes >> 20)) $((database_bytes >> 20))
}

main() {
	check_machine
	trap cleanup EXIT
	trap 'exit 130' INT TERM HUP
	mkdir -p "$dir"
	work=$(mktemp -d "$(realpath "$dir")/spindle-postgres.XXXXXX")
	mkdir "$work/log" "$work/run" "$work/bench" "$work/pool"
	chmod 711 "$work" "$work/run" "$work/log" "$work/bench"
	: >"$work/report"
	start_store
	start_spindle
	say "spindle serves $volume ($size) from $store_url"
	if [ "$mode" = kill ]; then run_variants; else run_side_by_side; fi
	local status=0
	kill -TERM "$spindle_pid"
	timeout 120 tail --pid="$spindle_pid" -f /dev/null || die 'spindle does not stop'
	spindle_pid=''
	check 'spindle fsck' "$spindle" fsck --dir "$work/pool" --store "$store_url"
	echo
	cat "$work/report"
	bucket
	[ $failed_count = 0 ] || { echo "$failed_count checks FAILED"; status=1; }
	exit $status
}

main
