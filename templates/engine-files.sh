# Functions that change the files of a container engine and make it load them. tasks/containers/engine_files.py puts them before a
# script that sets: mode (dry-run or apply), engine (the unit's name), main and own (its file, and a drop-in or nothing), daemon
# (the program), and made (what the new files are, for messages).
mode='' engine='' main='' own='' daemon='' made=''

# Puts the folder of the program that the engine's unit runs first in PATH: another one of its name may come before it there, or none.
use_programs_of_unit() {
  folder=$(systemctl show --property=ExecStart --value "$engine" | sed -n 's|^{ path=\(/[^ ]*\)/[^/ ]* ;.*|\1|p' | head -n 1)
  PATH=${folder:+$folder:}$PATH
}

# Until the end of the script, which runs in a mount namespace of its own, /etc is an overlay. The real files are at `real PATH`.
overlay() {
  for file in "$main" $own; do
    target=$(readlink -f "$file" || true)
    case $target in
    '' | /etc/*) ;;
    *) fault "$file is $target, a file outside /etc; put the file itself in /etc" ;;
    esac
  done
  mount -t tmpfs -o mode=700 tmpfs /tmp
  mkdir /tmp/etc /tmp/up /tmp/work
  mount --bind /etc /tmp/etc
  mount -t overlay -o lowerdir=/etc,upperdir=/tmp/up,workdir=/tmp/work overlay /etc
  cd /tmp
}
real() { echo "/tmp/etc${1#/etc}"; }

fault() {
  echo "fault $engine: $*"
  if [ "$mode" = dry-run ]; then exit 0; else exit 1; fi
}
# The last lines of the last command's output.
last_output() { grep . output | tail -n "$1" | tr '\n' ' '; }
version() { "$daemon" --version | sed -E 's/.* v?([0-9]+\.[0-9.]+).*/\1/'; }

# Prints one line for each key and its value; a list is one value.
flat() {
  awk '/^[ \t]*\[/ { sub(/^[ \t]*\[+/, ""); sub(/\]+[ \t]*$/, ""); at = $0 "."; next }
    / = / { sub(/^[ \t]*/, ""); print at $0 }' | grep -vE '^(imports|version) = ' | sort -u
}
# Prints containerd's configuration, as it reads its own files. The dump of containerd 2.0 up to 2.0.4 does not convert a file of
# version 2, as the daemon does (cmd/containerd/command/config.go): it shows default values in place of the file's.
containerd_config() {
  case $(version) in 1.*) containerd config dump ;; *) containerd config migrate ;; esac
}
containerd_view() {
  containerd_config >raw 2>output || fault "it cannot read its configuration: $(last_output 1)"
  flat <raw >"$1"
}

# Whether the daemon has started since the file was written (tasks/common/units.py).
started_since() { [ -z "$(stale "$engine" ExecMainStartTimestamp "$1")" ]; }
# Why a restart would stop running containers; nothing if it would not.
stopped_by_restart() {
  case $engine in
  containerd)
    # -x matches the process's name, which the kernel cuts off there. -f would match this script's own text, too.
    mode_of_kill=$(systemctl show --property=KillMode --value containerd)
    case $mode_of_kill in
    process | none) ;;
    *) if pgrep -x containerd-shim >/dev/null; then
        echo "with KillMode=$mode_of_kill in its unit would stop all containers; set KillMode=process"
      fi ;;
    esac ;;
  docker)
    running=$(timeout 60 docker info --format '{{.ContainersRunning}} {{.LiveRestoreEnabled}}' 2>/dev/null) || return 0
    case $running in
    "0 "* | *" true") ;;
    *) echo "would stop ${running% *} containers; set \"live-restore\": true in /etc/docker/daemon.json, or stop them" ;;
    esac ;;
  esac
}

# Prints a line if the engine has running containers. A docker that does not answer may have any that run.
containers_run() {
  running=
  if [ "$engine" = docker ]; then running=$(timeout 60 docker info --format '{{.ContainersRunning}}' 2>/dev/null) || running=; fi
  case $engine$running in
  docker0) ;;
  docker | containerd) if pgrep -x containerd-shim >/dev/null; then echo running; fi ;;
  docker*) echo running ;;
  crio) if pgrep conmon >/dev/null; then echo running; fi ;;
  esac
}

# Where another file may be beside one: above its folder of drop-ins. CRI-O reads every file in that (UpdateFromPath in its
# pkg/config/config.go).
beside() { folder=${1%/*}; echo "${folder%/*.d}/${1##*/}"; }
# Installs the overlay's files as the real ones, and keeps the former ones as FILE.previous. An unchanged file is left alone. Only
# the drop-in is always written, since started_since compares its time.
install_files() {
  changed=
  for file; do
    to=$(real "$file")
    if [ ! -e "$file" ] || { [ "$file" != "$own" ] && cmp -s "$file" "$to"; }; then continue; fi
    mkdir -p "${to%/*}"
    near=$(beside "$to")
    rm -f "$near.previous"
    # No copy: after a power cut that could be empty, and the file itself replaced.
    if [ -e "$to" ]; then ln "$to" "$near.previous"; fi
    cp -p "$file" "$near.new"
    touch "$near.new"
    put "$near.new" "$to"
    changed="$changed $to"
  done
}
give_up() {
  journal=$(journalctl --unit="$engine" --lines=4 --output=cat --no-pager)
  for to in $changed; do
    near=$(beside "$to")
    if [ -e "$near.previous" ]; then mv -T "$near.previous" "$to"; else rm -f "$to"; fi
  done
  if [ "$engine" = docker ] && systemctl --quiet is-active docker; then systemctl reload docker; else systemctl restart "$engine"; fi
  fault "$*; its former files are restored. Its journal ends: $journal"
}
within() {
  left=$1
  shift
  until "$@"; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || return 1
    sleep 1
  done
}
# containerd runs even if a plugin fails.
failed_plugins() { if [ "$engine" = containerd ]; then ctr plugins ls | awk '/cri/ && $NF == "error" { print $1 "." $2 }'; fi; }
restart_engine() {
  failed_plugins >failed
  systemctl restart "$engine" || give_up "it does not start with $made"
  if failed_plugins | grep -qvxFf failed; then
    give_up "its $(failed_plugins | tr '\n' ' ') fails with $made"
  fi
}
