# Configures a container engine by nvidia-ctk. tasks/container_runtime.py runs it by sh -e in a mount namespace of its own, and
# explains it. Arguments:
#
#   dry-run|apply docker|containerd|crio DEFAULT CDI    (the last two: yes or no)
#
# It prints `ran`, then lines of `fault TEXT`, `change KEY`, `lost KEY`, `pending`; nothing if nvidia-ctk or jq is missing.

mode=$1 engine=$2 default=$3 cdi=$4
case $engine in
docker) main=/etc/docker/daemon.json own= daemon=dockerd ;;
containerd) main=/etc/containerd/config.toml own=/etc/containerd/conf.d/99-nvidia.toml daemon=containerd ;;
crio) main=/etc/crio/crio.conf own=/etc/crio/crio.conf.d/99-nvidia.toml daemon=crio ;;
esac
for program in nvidia-ctk jq; do command -v "$program" >/dev/null || exit 0; done

mount -t tmpfs -o mode=700 tmpfs /tmp
mkdir /tmp/etc /tmp/up /tmp/work
mount --bind /etc /tmp/etc
mount -t overlay -o lowerdir=/etc,upperdir=/tmp/up,workdir=/tmp/work overlay /etc
cd /tmp
real() { echo "/tmp/etc${1#/etc}"; }

fault() {
  echo "fault $engine: $*"
  if [ "$mode" = dry-run ]; then exit 0; else exit 1; fi
}
# The last lines of the last command's output.
last_output() { grep . output | tail -n "$1" | tr '\n' ' '; }

# Prints one line for each key and its value; a list is one value.
flat() {
  awk '/^[ \t]*\[/ { sub(/^[ \t]*\[+/, ""); sub(/\]+[ \t]*$/, ""); at = $0 "."; next }
    / = / { sub(/^[ \t]*/, ""); print at $0 }' | grep -vE '^(imports|version) = ' | LC_ALL=C sort -u
}
leaves='
def leaves($at):
  if type == "object" and length > 0 then to_entries[] | .key as $key | .value | leaves($at + [$key])
  else "\($at | join(".")) = \(tojson)" end;
if type == "object" then leaves([]) else error("it is not an object") end'
# Writes the configuration to a file: the engine's own dump, if the engine can make one.
view() {
  case $engine in
  docker)
    if [ -e "$main" ]; then jq -r "$leaves" "$main" >raw 2>output || fault "$main: $(last_output 1)"; else : >raw; fi
    LC_ALL=C sort -u raw >"$1" ;;
  containerd)
    containerd config dump >raw 2>output || fault "it cannot read its configuration: $(last_output 1)"
    flat <raw >"$1" ;;
  crio)
    if [ -e "$own" ]; then flat <"$own" >"$1"; else : >"$1"; fi ;;
  esac
}

configure() {
  set -- --runtime="$engine" "$@"
  if [ "$default" = yes ]; then set -- "$@" --set-as-default; fi
  if [ "$cdi" = yes ] && [ "$engine" != crio ]; then set -- "$@" --cdi.enabled; fi
  nvidia-ctk --quiet runtime configure "$@" >output 2>&1 || fault "nvidia-ctk cannot change $main: $(last_output 2)"
  # The drop-in gets the mode of the file it was made from. A dump may come from any file, so only root may read it.
  case "$own $*" in
  " "*) ;;
  *command*) chmod 600 "$own" ;;
  *) if [ -e "$main" ]; then chmod --reference="$main" "$own"; chown --reference="$main" "$own"; fi ;;
  esac
}

ours='^(runtimes|features) = \{\}|^default-runtime = |^runtimes\.nvidia\.(path|args) = |^features\.cdi = '
ours="$ours|\.default_runtime_name = |\.enable_cdi = |\.runtimes\.['\"]?nvidia['\"]?\.options\.BinaryName = "
find_lost() { LC_ALL=C comm -23 operator result | grep -vE "$ours" >lost || true; }
has() { grep -qE "$1" result; }
version() { "$daemon" --version | sed -E 's/.* v?([0-9]+\.[0-9.]+).*/\1/'; }

command -v "$daemon" >/dev/null || fault "$daemon is not installed; install it, or remove $engine from engines"
echo ran
if [ "$engine" = containerd ] && [ ! -s "$main" ]; then
  mkdir -p /etc/containerd
  containerd config default >"$main"
fi
view present
if [ -n "$own" ]; then rm -f "$own"; fi
view operator
if [ -e "$main" ]; then cp -p "$main" original; fi
configure
view result
find_lost
if [ "$engine" = containerd ] && [ -s lost ]; then
  rm -f "$own" "$main"
  cp -p original "$main"
  configure --config-source=command
  view result
  find_lost
fi

case $engine in
docker)
  if [ "$cdi" = yes ] && [ "$(version | cut -d. -f1)" -lt 25 ]; then
    fault "docker $(version) does not support CDI; use 25.0 or later, or remove cdi"
  fi
  if [ "$default" != yes ] && has '^default-runtime = "nvidia"'; then
    fault "$main sets default-runtime to nvidia, which nvidia-ctk does not undo; remove it there, or give set_as_default True"
  fi
  if dockerd --help 2>&1 | grep -q -e --validate; then
    dockerd --validate --config-file="$main" >output 2>&1 || fault "dockerd does not accept $main: $(last_output 1)"
  fi ;;
containerd)
  if has '^disabled_plugins = .*["'\''](io\.containerd\.grpc\.v1\.)?cri["'\'']'; then
    fault "$main has cri in disabled_plugins, so Kubernetes cannot use containerd; remove cri there"
  fi
  if [ "$cdi" = yes ] && ! has '\.enable_cdi = true'; then
    fault "containerd $(version) does not support CDI; use 1.7 or later, or remove cdi"
  fi
  has '\.BinaryName = ["'\'']/usr/bin/nvidia-container-runtime["'\'']' ||
    fault "containerd $(version) ignores what nvidia-ctk writes; $main needs version = 2 or later"
  [ "$default" != yes ] || has '\.default_runtime_name = ["'\'']nvidia["'\'']' ||
    fault "containerd would still have another default runtime; a file that it imports after 99-nvidia.toml sets it" ;;
esac

LC_ALL=C comm -13 present result >wanted
LC_ALL=C comm -23 present result | LC_ALL=C comm -23 - operator >stale
cat wanted stale | sed -E 's/^/change /; s/ = .*//' | sort -u
sed -E 's/^/lost /; s/ = .*//' lost | sort -u

# Whether the running engine has loaded its files. dockerd can be asked. The others read their files when they start, so the files
# must not be newer than the process.
info() { timeout 60 docker info --format "$1" 2>/dev/null; }
loaded() {
  if [ "$engine" != docker ]; then
    # In UTC: the abbreviations of other time zones are ambiguous.
    started=$(date -d "$(TZ=UTC systemctl show --property=ExecMainStartTimestamp --value "$engine")" +%s)
    [ "$(stat -c %Y "$(real "$own")")" -le "$started" ]
    return
  fi
  case $(info '{{.DefaultRuntime}}:{{range $name, $_ := .Runtimes}} {{$name}} {{end}}') in
  nvidia:*" nvidia "*) ;;
  *:*" nvidia "*) [ "$default" != yes ] ;;
  *) return 1 ;;
  esac
}
cdi_loaded() { [ "$engine" != docker ] || [ "$cdi" != yes ] || info '{{json .CDISpecDirs}}' | grep -q /; }
active=$(systemctl is-active "$engine" || true)
if [ "$active" = active ] && ! { loaded && cdi_loaded; }; then echo pending; fi
if [ "$engine" = containerd ] && [ "$active" = active ] && [ -s wanted ] && pgrep -f containerd-shim >/dev/null &&
  [ "$(systemctl show --property=KillMode --value containerd)" = control-group ]; then
  fault "it must be restarted, which with KillMode=control-group in its unit would stop all containers; set KillMode=process"
fi
[ "$mode" = apply ] || exit 0

changed=
if [ -s wanted ] || [ -s stale ]; then
  if [ "$engine" = containerd ]; then
    # nvidia-ctk removes comments. So a main file that imports the drop-in already is left as it is.
    cp -p "$main" rewritten
    cp -p original "$main"
    view without
    cmp -s without result || cp -p rewritten "$main"
  fi
  for file in $main $own; do
    to=$(real "$file")
    # The drop-in is always written: loaded() compares its time with the daemon's start.
    if [ ! -e "$file" ] || { [ "$file" != "$own" ] && cmp -s "$file" "$to"; }; then continue; fi
    mkdir -p "${to%/*}"
    rm -f "$to.previous"
    if [ -e "$to" ]; then cp -p "$to" "$to.previous"; fi
    cp -p "$file" "$to.new"
    touch "$to.new"
    sync "$to.new"
    mv -T "$to.new" "$to"
    changed="$changed $to"
  done
fi
[ "$active" = active ] || exit 0

give_up() {
  journal=$(journalctl --unit="$engine" --lines=4 --output=cat --no-pager)
  for to in $changed; do if [ -e "$to.previous" ]; then mv -T "$to.previous" "$to"; else rm -f "$to"; fi; done
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

if [ "$engine" = docker ]; then
  systemctl reload docker
  within 20 loaded || give_up "dockerd does not accept $main"
  if ! within 3 cdi_loaded; then
    if [ "$(info '{{.LiveRestoreEnabled}}')" != true ] && [ "$(info '{{.ContainersRunning}}')" != 0 ]; then
      give_up "it must be restarted for CDI, which would stop $(info '{{.ContainersRunning}}') containers;" \
        'set "live-restore": true in '"$main, or stop them, and deploy again"
    fi
    systemctl restart docker || give_up "dockerd does not start with $main"
    within 20 cdi_loaded || give_up "dockerd does not enable CDI after its restart"
  fi
else
  failed_plugins >failed
  systemctl restart "$engine" || give_up "it does not start with nvidia-ctk's configuration"
  if failed_plugins | grep -qvxFf failed; then
    give_up "its $(failed_plugins | tr '\n' ' ') fails with nvidia-ctk's configuration"
  fi
fi
