"""Says whether the kernel would refuse modules because of their signature, as it does with Secure Boot.

A kernel that is locked down, or has module.sig_enforce, loads only modules whose signing key it knows (module_sig_check in
kernel/module/signing.c). A key of DKMS's own must be enrolled for that (mokutil), and confirmed at the console during a boot.
This is asked before packages replace a driver that works, and before a loaded driver is given up.

Read in the sources of the kernel, DKMS 3.0.10 and mokutil 0.6.0; no machine with Secure Boot was used.
"""

from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.context import host

from tasks.common.facts import Lines
from tasks.packages import Family

# DKMS signs with the key of its configuration, else on Ubuntu with that of update-secureboot-policy, else with one that it
# makes (prepare_signing in dkms). A certificate has its owner's name in plain text. Without files, DKMS's key itself is judged.
JUDGED = r"""
root=${MACHINE:-}
enforced() {
  grep -qE '\[(integrity|confidentiality)\]' "$root/sys/kernel/security/lockdown" 2>/dev/null ||
    grep -qx Y "$root/sys/module/module/parameters/sig_enforce" 2>/dev/null
}
certificates() {
  cat "$root"/etc/dkms/framework.conf "$root"/etc/dkms/framework.conf.d/*.conf 2>/dev/null |
    sed -n "s/^[[:space:]]*mok_certificate=[\"']\{0,1\}\([^\"']*\).*/\1/p" | tail -n 1
  for each in "$root/var/lib/shim-signed/mok/MOK.der" "$root/var/lib/dkms/mok.pub"; do
    if [ -e "$each" ]; then echo "$each"; fi
  done
}
# Why a key is not trusted; nothing if it is.
untrusted() {
  if ! command -v mokutil >/dev/null; then
    echo "mokutil is not installed, which says whether the key $1 is enrolled"
    return
  fi
  state=$(mokutil --test-key "$1" 2>&1) || true
  case $state in
  *'is already enrolled'* | *'is already in db'*) ;;
  *'enrollment request'*) echo "the key $1 waits to be enrolled: confirm it at the console during the next boot" ;;
  *'is not enrolled'*) echo "the key $1 is not enrolled" ;;
  *) echo "mokutil --test-key says: $state" ;;
  esac
}
why_refused() {
  signer=$(modinfo -F signer -- "$1" 2>/dev/null) || true
  if [ -z "$signer" ]; then
    echo 'it has no signature'
    return
  fi
  for certificate in $(certificates); do
    if grep -aqF "$signer" "$certificate" 2>/dev/null; then
      untrusted "$certificate"
      return
    fi
  done
  grep asymmetri "$root/proc/keys" | grep -qF "$signer:" || echo "the kernel has no key of its signer ($signer)"
}
# Why the modules are refused that DKMS will build.
built_refused() {
  # shellcheck disable=SC2046  # a certificate is a word
  set -- $(certificates)
  if [ "$#" = 0 ]; then echo 'DKMS has no key yet, and makes one that is not enrolled'; else untrusted "$1"; fi
}
file_refused() {
  reason=$(why_refused "$1")
  if [ -n "$reason" ]; then echo "${1##*/}: $reason"; fi
}
"""
"""Shell functions. MACHINE: the root folder; only tests set it."""

_NO_MORE = "kernel.modules_disabled"
DKMS = "dkms"
"""The modules that DKMS will build, in the place of a file."""

_REFUSED = f"""{JUDGED}
if [ "$(cat "$root/proc/sys/{_NO_MORE.replace(".", "/")}" 2>/dev/null)" = 1 ]; then
  echo {_NO_MORE}
elif enforced; then
  for file; do if [ "$file" = {DKMS} ]; then built_refused; else file_refused "$file"; fi; done
fi
"""

_REMEDY = (
    "Enroll the certificate of the key (mokutil --import), reboot, confirm it at the console and deploy again, or "
    "disable Secure Boot"
)
# A package has modules that the vendor has built and signed, or their source for DKMS. cpio is there, since dracut needs it.
OF_RPMS = f"""{JUDGED}
rpms_refused() {{  # arguments: the files of packages
  unpacked=$(mktemp -d -p /var/tmp trackbed-modules.XXXXXX)
  for rpm; do
    [ -e "$rpm" ] || continue
    if rpm --query --list --package "$rpm" 2>/dev/null | grep -q '/dkms[.]conf$'; then built_refused; fi
    rpm2cpio "$rpm" | (cd "$unpacked" && cpio --extract --make-directories --quiet '*.ko' '*.ko.*')
  done
  find "$unpacked" -name '*.ko*' | sort | while read -r file; do file_refused "$file"; done
  rm -rf "$unpacked"
}}
accept_rpms() {{  # arguments: the inventory's key, and the files of packages; it ends the script if modules would be refused
  key=$1; shift
  reasons=$(rpms_refused "$@" | sort -u)
  [ -n "$reasons" ] || return 0
  echo "$key: nothing is installed: with Secure Boot the kernel would refuse the modules:" >&2
  printf '%s\\n' "$reasons" | head -n 5 >&2
  echo '{_REMEDY}' >&2
  exit 1
}}
"""
"""The shell function `accept_rpms`, to be called if `enforced`."""


class RefusedModules(Lines):
    """Why the kernel would refuse modules: a line for each file, or one if it loads no module at all."""

    def command(self, files: tuple[str, ...]) -> StringCommand:
        """Ask the kernel whether it checks signatures, and mokutil whether the key is enrolled."""
        return self.script(_REFUSED, *files)


def refusal_of_packages(key: str, family: Family) -> str | None:
    """For an operation: the message of :func:`refusal` before packages with modules are installed.

    In the Debian family DKMS builds the modules. In the RHEL family :data:`OF_RPMS` judges those that the packages have.
    """
    return refusal(key, *((DKMS,) if family == "debian" else ()))


def refusal(key: str, *files: str) -> str | None:
    """For an operation: the message if the kernel would refuse these modules, or loads no module at all; else None."""
    reasons = host.get_fact(RefusedModules, files=files)
    if not reasons:
        return None
    if reasons == [_NO_MORE]:
        return (
            f"{key}: the kernel loads no more modules in this boot ({_NO_MORE} is 1), so the loaded ones stay. Do not set "
            "it at the next boot (sysctl.d), reboot, and deploy again"
        )
    return (
        f"{key}: with Secure Boot the kernel would refuse the modules: {'; '.join(reasons)}. So the loaded ones stay. "
        f"{_REMEDY}"
    )
