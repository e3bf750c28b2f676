# Sets what Kubernetes needs in containerd's main file. tasks/containers/container_engine.py runs it after engine-files.sh, by sh -e in a
# mount namespace of its own, and explains it. Argument: dry-run|apply
#
# It prints `ran`, then lines of `fault TEXT`, `change KEY`, `lost KEY`, `pending`; nothing if containerd is missing.

mode=$1 engine=containerd main=/etc/containerd/config.toml own= daemon=containerd made="SystemdCgroup and the CRI plugin"
use_programs_of_unit
command -v containerd >/dev/null || exit 0

overlay

# The version of the file, and the ID of the plugin in it. containerd 2 still reads version 2.
file_version() { sed -n '/^[ \t]*\[/q; s/^[ \t]*version[ \t]*=[ \t]*\([0-9]*\).*/\1/p' "$main" 2>/dev/null || true; }
newest() { if [ "$(version | cut -d. -f1)" -ge 2 ]; then echo 3; else echo 2; fi; }
plugin() { if [ "$1" = 2 ]; then echo io.containerd.grpc.v1.cri; else echo io.containerd.cri.v1.runtime; fi; }

disabled='^disabled_plugins = .*["'\''](cri|io\.containerd\.grpc\.v1\.cri|io\.containerd\.cri\.v1\.(images|runtime))["'\'']'
set_for_runc='\.containerd\.runtimes\.runc\.options\.SystemdCgroup = true'
suits() { ! grep -qE "$disabled" "$1" && has_driver "$1"; }
# A kubelet that uses cgroupfs needs what runc does by default.
has_driver() { [ "$driver" = cgroupfs ] || grep -qE "$set_for_runc" "$1"; }

# The cgroup driver in the kubelet's configuration; nothing if there is none yet. Where none is named, it is cgroupfs (cgroupDriver in
# staging/src/k8s.io/kubelet/config/v1beta1/types.go). kubeadm writes systemd.
kubelet=/var/lib/kubelet/config.yaml
for process in $(pgrep -x kubelet); do
  tr '\0' '\n' <"/proc/$process/cmdline" >arguments || continue
  named=$(sed -n 's/^--config=//p; /^--config$/{n;p}' arguments)
  kubelet=${named:-$kubelet}
  driver=$(sed -n 's/^--cgroup-driver=//p; /^--cgroup-driver$/{n;p}' arguments)
  more=$(sed -n 's/^--config-dir=//p; /^--config-dir$/{n;p}' arguments)
done
if [ -z "${driver:=}" ] && [ -r "$kubelet" ]; then
  # Files of the folder override the file (KubeletConfiguration, since Kubernetes 1.28).
  # They are YAML or JSON.
  driver=$(cat "$kubelet" "${more:-/nowhere}"/*.conf 2>/dev/null | sed 's/#.*//' |
    grep -oE '"?cgroupDriver"?:[[:space:]]*["'\'']?[a-z]+' | tail -n 1 | grep -oE '[a-z]+$') || true
  driver=${driver:-cgroupfs}
fi

# Whether a file says that runc's driver is not systemd's. In a section with NoNewKeyring nobody has said so: that is how `containerd
# config default` writes all default values.
says_cgroupfs() {
  awk '
    { line = $0; sub(/#.*/, "", line); gsub(/[ \t]/, "", line); gsub(/\047/, "\"", line) }
    line ~ /^\[/ { within = line ~ /\.containerd\.runtimes\.runc\.options\]$/ }
    within && line == "SystemdCgroup=false" { said = 1 }
    within && line == "NoNewKeyring=false" { written = 1 }
    END { exit !(said && !written) }' "$1"
}
# The main file, and those that it imports.
read_files() { echo "$main"; sed -n 's/^ *imports = //p' raw 2>/dev/null | tr -d "[],'\"" | tr ' ' '\n'; }

# Edits the file by lines, so that comments stay. Reads it twice: first to see what it has, then to print it. If the file has
# entries of a map, containerd before 2.1 ignores the map's default entries, so runc's entry needs its type, too.
edit() {
  awk -v id="$(plugin "$1")" -v version="$1" -v keep="$(has_driver present && echo yes)" '
    BEGIN {
      runc = "[plugins.\"" id "\".containerd.runtimes.runc]"
      options = "[plugins.\"" id "\".containerd.runtimes.runc.options]"
      type = "  runtime_type = \"io.containerd.runc.v2\""
      cgroup = "  SystemdCgroup = true"
    }
    { line = $0; gsub(/[ \t]/, "", line); gsub(/\047/, "\"", line); sub(/\]#.*/, "]", line) }
    FNR == 1 { at = "" }
    line ~ /^\[/ { at = line }
    NR == FNR {
      if (line ~ /^\[/) there[at]
      if (at == "" && line ~ /^version=/) versioned = 1
      if (at == runc && line ~ /^runtime_type=/) typed = 1
      if (at == options && line ~ /^SystemdCgroup=/) given = 1
      next
    }
    FNR == 1 && !versioned { print "version = " version }
    at == "" && line ~ /^disabled_plugins=/ {
      gsub(/["\047](cri|io\.containerd\.grpc\.v1\.cri|io\.containerd\.cri\.v1\.(images|runtime))["\047][ \t]*,?[ \t]*/, "")
      sub(/,[ \t]*\]/, "]")
    }
    at == options && line ~ /^SystemdCgroup=/ && !keep { sub(/=.*/, "= true") }
    { print }
    keep { next }
    line == runc && !typed { print type }
    line == options && !given { print cgroup }
    END {
      if (keep) exit
      if (!(runc in there)) print "\n" runc "\n" type
      if (!(options in there)) print "\n" options "\n" cgroup
    }' "$main" "$main" >edited
  cat edited >"$main"
}

echo ran
containerd config default | flat >./default
if [ -s "$main" ]; then containerd_view present; else cp default present; fi
if suits present; then
  : >wanted
  : >lost
else
  new=$(file_version)
  if [ "$new" = 1 ] || { [ -z "$new" ] && grep -qE '^[ \t]*\[' "$main" 2>/dev/null; }; then
    fault "$main is of version 1, which knows the plugin of Kubernetes by another name; rewrite it as version 2" \
      '(`containerd config default` shows the form)'
  fi
  if ! has_driver present; then
    for file in $(read_files); do
      if [ -e "$file" ] && says_cgroupfs "$file"; then
        fault "$file sets SystemdCgroup = false for runc, but the kubelet's cgroup driver is ${driver:-not known yet}; set it to" \
          "true there for a kubelet that uses systemd, or cgroupDriver: cgroupfs in $kubelet"
      fi
    done
  fi
  mkdir -p "${main%/*}"
  [ -s "$main" ] || echo "version = $(newest)" >"$main"
  edit "${new:-$(newest)}"
  containerd_config >/dev/null 2>output || fault "$main cannot be edited by lines: $(last_output 1); set SystemdCgroup = true" \
    "for runc there, and take cri out of disabled_plugins"
  containerd_view result
  if grep -qE "$disabled" result; then
    fault "the CRI plugin is still disabled; remove cri from disabled_plugins in $main or a file that it imports"
  fi
  if ! has_driver result; then
    for file in $(read_files); do
      if [ "$file" != "$main" ] && grep -qE "$(plugin 2)|$(plugin 3)" "$file" 2>/dev/null; then
        fault "$file, which $main imports, has settings of the CRI plugin, and containerd $(version) takes those of one file" \
          "as a whole; set SystemdCgroup = true for runc in that file"
      fi
    done
    fault "SystemdCgroup of runc is still not true: containerd $(version) does not know version $(file_version) of the file" \
      "$main; write it in the version that \`containerd config default\` shows"
  fi
  comm -13 present result >wanted
  ours='^disabled_plugins = |\.runc\.(runtime_type|options\.SystemdCgroup) = '
  # containerd 2 converts a section of version 2 only when the plugin is enabled.
  if grep -qE "$disabled" present; then ours="$ours|^plugins\.['\"]io\.containerd\.grpc\.v1\.cri['\"]\."; fi
  # A default value that the dump no longer has, because the file has that entry now, is not a setting of the operator's.
  comm -23 present result | comm -23 - default | grep -vE "$ours" >lost || true
fi
# If the plugin was disabled, each of its keys is new.
grep -E '^disabled_plugins = |\.runc\.(runtime_type|options\.SystemdCgroup) = ' wanted | sed -E 's/^/change /; s/ = .*//' | sort -u
sed -E 's/^/lost /; s/ = .*//' lost | sort -u

active=$(systemctl is-active containerd || true)
if [ "$active" = active ] && [ -e "$(real "$main")" ] && ! started_since "$(real "$main")"; then echo pending; fi
if [ "$active" = active ] && [ -s wanted ]; then
  reason=$(stopped_by_restart)
  [ -z "$reason" ] || fault "it must be restarted, which $reason"
fi
[ "$mode" = apply ] || exit 0

changed=
install_files "$main"
[ "$active" = active ] || exit 0
restart_engine
