#!/bin/bash
# A PostgreSQL server's disk, kept every night and at a second provider: a script to copy and to change.
# See README.md beside this file.
#
#   dr.sh nightly         from cron or a timer: a snapshot, and everything up to it at the second provider
#   dr.sh testdb [NAME]   a database to break: a volume (db-test) that begins with the newest snapshot, and
#                         goes by itself after 8 hours
#   dr.sh drill           on any machine that reaches the second provider: restore there, start PostgreSQL
#                         on the newest snapshot, check it, and throw it all away
#   dr.sh restore DIR STORE   for real: a pool in DIR and STORE that shows what the second provider has
#
# What is where is said by variables, in the environment or in the file that DR_CONFIG names
# (/etc/spindle-dr):
#
#   DIR        directory of the daemon whose pool has the database's volume (/var/lib/spindle)
#   VOLUME     that volume (db)
#   COPY       URL of an empty prefix at the second provider, like az://container/db
#   COPY_ENV   what the names of the variables with its settings and credentials begin with, where they are
#              not the usual ones: COPY_ENV=DR_ means DR_AZURE_STORAGE_ACCOUNT_NAME and so on. The daemon
#              on DIR has to have these variables, too
#   KEY        a copy of the pool's key file, for drill and restore (DIR/spindle.key)
#   DRILL      URL of an empty prefix for a drill, with its settings under their usual names
#   KEEP       nights that are kept (14)
#   NIGHT      name of the night (the date in UTC); a night that was cut short is gone on with
#   PGDATA     the database's directory on the volume, from its root (data)
#   SPINDLE    the program (spindle)
#
# A drill mounts, so it runs as root, and needs nbdfuse (libnbd-bin) and PostgreSQL, of the database's own
# version, with pg_amcheck. spindle attach makes a disk of the kernel, where nbdfuse is too slow.
set -euo pipefail

config=${DR_CONFIG:-/etc/spindle-dr}
# shellcheck source=/dev/null
[ ! -r "$config" ] || { set -a; . "$config"; set +a; }
: "${DIR:=/var/lib/spindle}" "${VOLUME:=db}" "${COPY_ENV:=}" "${KEEP:=14}" "${PGDATA:=data}"
: "${KEY:=$DIR/spindle.key}" "${NIGHT:=$(date -u +%Y%m%d)}" "${SPINDLE:=spindle}"
copy_env=()
[ -z "$COPY_ENV" ] || copy_env=(--env-prefix "$COPY_ENV")

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
die() { printf 'dr.sh: %s\n' "$*" >&2; exit 1; }
needs() { # VARIABLE…
	local name
	for name; do
		[ -n "${!name:-}" ] || die "$name is not set; the beginning of this script explains it"
	done
}

# The snapshots that nightly has made, oldest first.
nights() { "$SPINDLE" snapshot list "$VOLUME" "$@" | awk '{print $1}' | grep -F "$VOLUME@nightly-" || true; }

nightly() {
	needs COPY
	local snapshot=$VOLUME@nightly-$NIGHT name old
	# What PostgreSQL has on its disk at this instant is what it would find after a loss of power.
	nights --dir "$DIR" | grep -qxF "$snapshot" ||
		"$SPINDLE" snapshot create "$snapshot" --dir "$DIR" >/dev/null
	say "$snapshot"
	"$SPINDLE" copy list --dir "$DIR" | awk '{print $1}' | grep -qxF "$COPY" ||
		"$SPINDLE" copy add "$COPY" "${copy_env[@]}" --dir "$DIR"
	"$SPINDLE" copy sync "$COPY" --dir "$DIR"
	say "$COPY has it"
	# Only now: nothing goes before what takes its place is at both providers.
	mapfile -t old < <(nights --dir "$DIR" | head -n "-$KEEP")
	for name in "${old[@]}"; do
		# One that a clone still needs goes another night.
		"$SPINDLE" snapshot rm "$name" --dir "$DIR" >/dev/null && say "removed $name" || say "$name stays"
	done
}

testdb() { # [NAME]
	local name=${1:-$VOLUME-test} snapshot
	snapshot=$(nights --dir "$DIR" | tail -n 1)
	[ -n "$snapshot" ] || die "no snapshot of $VOLUME; make one with: dr.sh nightly"
	# Yesterday's, and nothing else. It stays, with an error, while somebody uses it.
	if "$SPINDLE" volume show "$name" --dir "$DIR" >/dev/null 2>&1; then
		"$SPINDLE" volume show "$name" --dir "$DIR" | grep -qF "$VOLUME@nightly-" ||
			die "$name is there, and was not made from a night of $VOLUME: choose another name"
		"$SPINDLE" volume rm "$name" --now --dir "$DIR" >/dev/null
	fi
	"$SPINDLE" clone "$snapshot" "$name" --ttl 8h --dir "$DIR" >/dev/null
	say "$name begins with $snapshot; a disk of this machine: $SPINDLE attach $name --dir $DIR"
}

restore() { # DIR STORE
	needs COPY KEY
	"$SPINDLE" restore "$COPY" "${copy_env[@]}" --dir "$1" --store "$2" --key-file "$KEY"
	say "serve it with: $SPINDLE serve --dir $1 --store $2 --key-file $KEY"
}

# --- the drill: what must be undone, whatever happens ---

work='' served='' fuse='' postgres='' made=''

gone() { timeout "$2" tail --pid="$1" -f /dev/null; } # PID SECONDS

clean_up() {
	local status=$?
	trap '' INT TERM HUP
	trap - EXIT
	set +e
	# Of itself it ends within seconds; its disk goes after it.
	[ -z "$postgres" ] || { kill -INT "$postgres" 2>/dev/null; gone "$postgres" 60 || kill -KILL "$postgres"; }
	# The loop device goes with the mount.
	! mountpoint -q "$work/mnt" || umount "$work/mnt" || umount -l "$work/mnt"
	[ -z "$fuse" ] || { umount "$work/disk" || umount -l "$work/disk"; gone "$fuse" 30 || kill -KILL "$fuse"; }
	[ -z "$served" ] || { kill -TERM "$served"; gone "$served" 120 || kill -KILL "$served"; }
	if [ -n "$made" ]; then
		# Its objects, and the pin by which it kept its state at the copy.
		local pool=(--dir "$work/pool" --store "$DRILL" --key-file "$KEY")
		"$SPINDLE" pool rm "${pool[@]}" && "$SPINDLE" pool purge --now "${pool[@]}" || status=1
	fi >>"$work/log" 2>&1
	[ "$status" = 0 ] || tail -n 20 "$work/log" >&2
	if findmnt -rno TARGET | grep -q "^$work/"; then
		echo "dr.sh: still mounted below $work: left as it is" >&2
		exit 1
	fi
	rm -rf "$work"
	exit "$status"
}

# until_it SECONDS PID COMMAND…: succeeds, for which that process has to be there.
until_it() {
	local deadline=$((SECONDS + $1)) pid=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $deadline ] && kill -0 "$pid" 2>/dev/null || return 1
		sleep 0.05
	done
}

as_postgres=(setpriv --reuid=postgres --regid=postgres --init-groups --)

drill() {
	needs COPY DRILL KEY
	[ "$(id -u)" = 0 ] || die 'a drill mounts: run it as root'
	local programs snapshot device begun=$SECONDS
	programs=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
	work=$(mktemp -d "${TMPDIR:-/tmp}/dr.XXXXXX")
	trap clean_up EXIT
	trap 'exit 130' INT TERM HUP
	chmod 711 "$work"
	mkdir "$work/mnt" "$work/run"
	: >"$work/disk"
	local pool=(--dir "$work/pool" --store "$DRILL" --key-file "$KEY")
	"$SPINDLE" restore "$COPY" "${copy_env[@]}" "${pool[@]}"
	made=yes
	"$SPINDLE" serve "${pool[@]}" --nbd-unix "$work/run/nbd" >"$work/served" 2>>"$work/log" &
	served=$!
	until_it 60 $served grep -qx ready "$work/served" || die 'the restored pool does not open'
	snapshot=$(nights "${pool[@]}" | tail -n 1)
	[ -n "$snapshot" ] || die "the second provider has no snapshot of $VOLUME"
	"$SPINDLE" clone "$snapshot" drill "${pool[@]}" >/dev/null
	say "restored; $snapshot is there"

	nbdfuse -C 4 "$work/disk" "nbd+unix:///drill?socket=$work/run/nbd" >>"$work/log" 2>&1 &
	fuse=$!
	until_it 20 $fuse test -s "$work/disk" || die 'the disk does not appear'
	device=$(losetup --direct-io=on -f --show "$work/disk")
	# A file system that was in use is as after a loss of power: its journal is replayed.
	e2fsck -fp "$device" >>"$work/log" 2>&1 || [ $? -lt 4 ] || { losetup -d "$device"; die 'e2fsck found damage'; }
	mount "$device" "$work/mnt" || { losetup -d "$device"; die 'it does not mount'; }
	losetup -d "$device"

	# Of the server that ran on it.
	rm -f "$work/mnt/$PGDATA/postmaster.pid"
	chown postgres: "$work/run"
	"${as_postgres[@]}" "$programs/postgres" -D "$work/mnt/$PGDATA" -c listen_addresses= \
		-c unix_socket_directories="$work/run" -c archive_mode=off >>"$work/log" 2>&1 &
	postgres=$!
	until_it 300 $postgres "${as_postgres[@]}" "$programs/pg_isready" -q -h "$work/run" ||
		die 'PostgreSQL does not start'
	say "PostgreSQL answers, $((SECONDS - begun)) s after the drill began"
	"${as_postgres[@]}" "$programs/pg_amcheck" -h "$work/run" --all --install-missing ||
		die 'pg_amcheck has found damage'
	say 'pg_amcheck finds nothing'
	"$SPINDLE" status "${pool[@]}" | grep '^restored' || true
}

case ${1:-} in
nightly) nightly ;;
testdb) testdb "${2:-}" ;;
drill) drill ;;
restore) [ $# = 3 ] || die 'restore takes two: DIR STORE'; restore "$2" "$3" ;;
*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
