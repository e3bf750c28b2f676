# Configures a container engine by nvidia-ctk. tasks/containers/container_runtime.py runs it after engine-files.sh, by sh -e in a mount
# namespace of its own, and explains it. Arguments:
#
#   dry-run|apply docker|containerd|crio DEFAULT CDI    (the last two: yes or no)
#
# It prints `ran`, then lines of `fault TEXT`, `warning TEXT`, `change KEY`, `lost KEY`, `pending`; nothing if nvidia-ctk or jq is missing.

mode=$1 engine=$2 default=$3 cdi=$4 made="nvidia-ctk's configuration"
case $engine in
docker) main=/etc/docker/daemon.json own= daemon=dockerd ;;
containerd) main=/etc/containerd/config.toml own=/etc/containerd/conf.d/99-nvidia.toml daemon=containerd ;;
crio) main=/etc/crio/crio.conf own=/etc/crio/crio.conf.d/99-nvidia.toml daemon=crio ;;
esac
use_programs_of_unit
for program in nvidia-ctk jq; do command -v "$program" >/dev/null || exit 0; done
# Distributions of Kubernetes have a containerd of their own, which reads nothing in /etc/containerd.
ELSEWHERE="leave containerd out of container_runtime.engines; that of k3s and RKE2 finds the toolkit when their service is \
restarted (the default: default-runtime in config.yaml), that of k0s and MicroK8s reads an entry of the runtime in \
/etc/k0s/containerd.d and in /var/snap/microk8s/current/args/containerd-template.toml"
other_containerds() {
  for process in $(pgrep -x containerd || true); do
    sed -nE 's,.*/((snap\.microk8s|k3s|rke2|k0s)[^/]*)\.service.*,\1,p' "${MACHINE:-}/proc/$process/cgroup" 2>/dev/null || true
  done | sort -u
}
find_containerd() {
  command -v containerd >/dev/null || fault "the node has no containerd of its own; where Kubernetes brings one, $ELSEWHERE"
  for unit in $(other_containerds); do echo "warning the containerd of $unit is another one: $ELSEWHERE"; done
}
if [ "$engine" = containerd ]; then find_containerd; fi
for snaps in /snap /var/lib/snapd/snap; do
  if [ "$engine" = docker ] && [ -e "$snaps/docker/current" ]; then
    fault "it is a snap, which does not read $main; replace it by docker of a package (container_engine)"
  fi
done

overlay

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
    sort -u raw >"$1" ;;
  containerd)
    containerd_view "$1" ;;
  crio)
    if [ -e "$own" ]; then flat <"$own" >"$1"; else : >"$1"; fi ;;
  esac
}

# nvidia-ctk 1.18.0 puts its own drop-in in the place of all imported files (github.com/NVIDIA/nvidia-container-toolkit/pull/1382).
imported() {
  awk '/^ *imports *=/ { list = 1 } list; list && /\]/ { exit }' "$1" | sed 's/#.*//; s/.*\[//; s/\].*//' | tr ',' '\n' |
    tr -d " \t'\""
}
keep_imports() {
  imported original | grep . | while read -r each; do
    imported "$main" | grep -qxF -e "$each" || sed -i "0,/^ *imports *= *\[/s||&\"$each\", |" "$main"
  done
}

configure() {
  set -- --runtime="$engine" "$@"
  if [ "$default" = yes ]; then set -- "$@" --set-as-default; fi
  if [ "$cdi" = yes ] && [ "$engine" != crio ]; then set -- "$@" --cdi.enabled; fi
  # Its own choice is a path that CRI-O does not read, and in 1.18.0 one that containerd does not read by default.
  if [ -n "$own" ]; then
    nvidia-ctk runtime configure --help 2>&1 | grep -q -e --drop-in-config ||
      fault "nvidia-ctk makes no $own; install nvidia-container-toolkit 1.18 or later"
    set -- "$@" --drop-in-config="$own"
  fi
  nvidia-ctk --quiet runtime configure "$@" >output 2>&1 || fault "nvidia-ctk cannot change $main: $(last_output 2)"
  if [ "$engine" = containerd ] && [ -e original ]; then keep_imports; fi
  # The drop-in gets the mode of the file it was made from. A dump may come from any file, so only root may read it.
  case "$own $*" in
  " "*) ;;
  *command*) chmod 600 "$own" ;;
  *) if [ -e "$main" ]; then chmod --reference="$main" "$own"; chown --reference="$main" "$own"; fi ;;
  esac
}

# An empty runtimeArgs says the same as none, so nothing is lost with it.
ours='^(runtimes|features) = \{\}|^default-runtime = |^runtimes\.nvidia\.(path|args) = |^features\.cdi = '
ours="$ours|^runtimes\.nvidia\.runtimeArgs = \[\]\$"
ours="$ours|\.default_runtime_name = |\.enable_cdi = |\.runtimes\.['\"]?nvidia['\"]?\.options\.BinaryName = "
find_lost() { comm -23 operator result | grep -vE "$ours" >lost || true; }
# dockerd does not start if a key of its file is also among its arguments, so those of the running one are given, too.
validate() {
  pid=$(systemctl show --property=MainPID --value docker)
  if [ -s "/proc/$pid/cmdline" ]; then
    xargs -0 -a "/proc/$pid/cmdline" sh -c 'exec "$0" --validate "$@"'
  else
    dockerd --validate --config-file="$main"
  fi
}
has() { grep -qE "$1" result; }
# nvidia-ctk copies runc's entry from the main file. Since 2.1 containerd merges a plugin's keys, so another file may have them, or
# none, where they have their default values. nvidia-ctk before 1.20 then leaves out the type, too. Its drop-in from a dump may be of
# a later version than the main file, which containerd 2.3 refuses (github.com/NVIDIA/aicr/issues/1688).
complete_entry() {
  at='^ *\[.*\.runtimes\.nvidia'
  if ! has "\.runtimes\.['\"]?nvidia['\"]?\.runtime_type = ['\"][^'\"]"; then
    sed -i "/$at\]/a runtime_type = \"io.containerd.runc.v2\"" "$own"
  fi
  set=options.SystemdCgroup\ =\ true
  if has "\.runtimes\.['\"]?runc['\"]?\.$set" && ! has "\.runtimes\.['\"]?nvidia['\"]?\.$set"; then
    sed -i "/$at\.options\]/a SystemdCgroup = true" "$own"
  fi
}

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
if [ "$engine" = containerd ]; then
  if [ -s lost ]; then
    rm -f "$own" "$main"
    cp -p original "$main"
    configure --config-source=command
    view result
  fi
  complete_entry
  view result
  find_lost
fi

# CRI-O reads its drop-ins by their names, and the last one counts.
refuse_later_default() {
  for file in "${own%/*}"/*; do
    if [ "$(printf '%s\n' "$file" "$own" | sort | tail -n 1)" != "$own" ] &&
      grep -E '^[[:space:]]*default_runtime[[:space:]]*=' "$file" | grep -qv '"nvidia"'; then
      fault "$file sets another default_runtime after $own; remove it there, or give set_as_default False"
    fi
  done
}

case $engine in
docker)
  if [ "$cdi" = yes ] && [ "$(version | cut -d. -f1)" -lt 25 ]; then
    fault "docker $(version) does not support CDI; use 25.0 or later, or remove cdi"
  fi
  if [ "$default" != yes ] && has '^default-runtime = "nvidia"'; then
    fault "$main sets default-runtime to nvidia, which nvidia-ctk does not undo; remove it there, or give set_as_default True"
  fi
  if dockerd --help 2>&1 | grep -q -e --validate; then
    validate >output 2>&1 || fault "dockerd does not accept $main: $(last_output 1)"
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
crio)
  if [ "$default" = yes ]; then refuse_later_default; fi ;;
esac

# It reads its own file first, whatever it is asked (rt.Run in nvidia-container-toolkit). No container would start with a fault there.
usable() {
  if nvidia-container-runtime --version 2>&1 | grep 'error loading config' >output; then
    fault "nvidia-container-runtime does not accept /etc/nvidia-container-runtime/config.toml: $(last_output 1); correct it there"
  fi
}
usable
# Only engines without root need this setting. Where the runtime leaves the devices to its hook (the mode legacy, and auto before 1.18),
# containers then see GPUs that they may not open.
find_closed_gpus() {
  settings=/etc/nvidia-container-runtime/config.toml
  setting() { sed -nE "s/^[[:space:]]*$1[[:space:]]*=[[:space:]]*\"?([a-z]+).*/\1/p" "${MACHINE:-}$settings" 2>/dev/null | head -n 1; }
  minor=$(nvidia-ctk --version 2>/dev/null | sed -n 's/.*version 1\.\([0-9]*\).*/\1/p' | head -n 1)
  [ "$(setting no-cgroups)" = true ] || return 0
  case $(setting mode) in
  legacy) ;;
  auto | '') [ "${minor:-18}" -lt 18 ] || return 0 ;;
  *) return 0 ;;
  esac
  echo "warning $settings has no-cgroups = true, which only an engine without root needs: containers of $engine may not open their" \
    "GPUs (Failed to initialize NVML: Unknown Error); set it to false, or the mode to cdi"
}
find_closed_gpus

comm -13 present result >wanted
comm -23 present result | comm -23 - operator >stale
cat wanted stale | sed -E 's/^/change /; s/ = .*//' | sort -u
sed -E 's/^/lost /; s/ = .*//' lost | sort -u

# Version 1.0.0 kept the former drop-in where CRI-O reads it.
left_by_1_0_0() { [ "$engine" = crio ] && [ -e "$(real "$own").previous" ]; }
# Whether the running engine has loaded its files. dockerd can be asked. The others read their files when they start, so the files
# must not be newer than the process.
info() { timeout 60 docker info --format "$1" 2>/dev/null; }
loaded() {
  if [ "$engine" != docker ]; then
    ! left_by_1_0_0 && started_since "$(real "$own")"
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
case $active in
active) ;;
failed) fault "it has failed, so nothing can load $made; mend it (journalctl --unit=$engine), start it, and deploy again" ;;
*) echo "warning $engine is $active: whether it accepts $made shows only when it starts; start it and deploy again" ;;
esac
if [ "$active" = active ] && ! { loaded && cdi_loaded; }; then echo pending; fi
if [ "$engine" = containerd ] && [ "$active" = active ] && [ -s wanted ]; then
  reason=$(stopped_by_restart)
  [ -z "$reason" ] || fault "it must be restarted, which $reason"
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
  # The drop-in is always written: loaded() compares its time with the daemon's start.
  # shellcheck disable=SC2086  # none, or one file
  install_files "$main" $own
fi
if left_by_1_0_0; then rm "$(real "$own").previous"; fi
[ "$active" = active ] || exit 0

if [ "$engine" = docker ]; then
  systemctl reload docker
  within 20 loaded || give_up "dockerd does not accept $main"
  if ! within 3 cdi_loaded; then
    reason=$(stopped_by_restart)
    [ -z "$reason" ] || give_up "it must be restarted for CDI, which $reason, and deploy again"
    systemctl restart docker || give_up "dockerd does not start with $main"
    within 20 cdi_loaded || give_up "dockerd does not enable CDI after its restart"
  fi
else
  restart_engine
fi
