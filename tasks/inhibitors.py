"""The locks of logind by which a program forbids a reboot (systemd-inhibit(1)). apt has one while dpkg runs.

Before systemd 257, root reboots a host in spite of them, which cuts the program off. Since then logind refuses that, and nobody
would hear of it: a timer reboots the host.
"""

WAIT = r"""
forbidden() {
  busctl call org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager ListInhibitors 2>/dev/null |
    grep -oE '"[a-z:-]*" ("([^"\\]|\\.)*" ){2}"block" [0-9]+ [0-9]+' |
    sed -nE 's/^"([a-z:-]*:)?shutdown(:[a-z:-]*)?" (".*") (".*") "block" [0-9]+ ([0-9]+)$/\3 (process \5): \4/p'
}
left=60
while why=$(forbidden) && [ -n "$why" ]; do
  left=$((left - 1))
  if [ "$left" = 0 ]; then
    printf 'the host is not rebooted, since a program forbids it: %s; wait until it has ended, and deploy again\n' "$why" >&2
    exit 1
  fi
  sleep 5
done
"""
"""A script that waits up to five minutes until no program forbids a reboot, and then fails with their names."""
