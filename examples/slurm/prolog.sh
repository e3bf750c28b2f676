#!/bin/sh
# A prolog for Slurm (`Prolog=` in slurm.conf): refuses a job on a node that is not ready.
#
# If a prolog fails, Slurm drains the node with the reason "Prolog error" and requeues the job. So that `sinfo -R` says why, this one
# drains the node first: Slurm keeps the reason of a node that is drained already. Slurm advises against its own commands in a
# prolog; there is one here, it runs only where a job is refused, and not for long.
set -u

# Seconds. How long the node may take to become ready, and how long `trackbed` may take in all. Slurm expects a prolog to end within
# its MessageTimeout, 10 s by default.
within=3
limit=5

# Slurm gives a prolog no search path.
PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
export PATH

node="${SLURMD_NODENAME:?is not set; only slurmd starts this script, as Prolog=}"

refuse() {
    # printf, since echo of some shells reads backslashes.
    printf 'node %s is refused: %s\n' "$node" "$1" >&2
    timeout -k 1 2 scontrol update "NodeName=$node" State=DRAIN "Reason=trackbed: $1" >/dev/null 2>&1
    exit 1
}

command -v trackbed >/dev/null || refuse "trackbed is not installed; deploy to this node"

# With `exit` an inner shell stays. Its word "Killed" for a timeout that ended by SIGKILL goes into the variable, too.
said=$(exec 2>&1; timeout -k 1 "$limit" trackbed wait --timeout "$within"; exit $?)
status=$?

case "$status" in
    0) exit 0 ;;
    # timeout(1): 124 after SIGTERM, 137 after SIGKILL.
    124 | 137) refuse "trackbed did not answer within $limit s; see systemctl status trackbed" ;;
esac

# All reasons on one line, of printable characters.
reasons=$(printf '%s\n' "$said" | tr -cd '\n -~' | awk '{ sub(/^trackbed: /, ""); printf "%s%s", (NR > 1 ? "; " : ""), $0 }')
refuse "$(printf '%.300s' "${reasons:-trackbed wait ended with status $status}")"
