#!/bin/sh
# Written by Trackbed. irqbalance runs this for each interrupt: $1 is its device's folder in sysfs.
# The agent keeps the list of the physical functions whose interrupts, and whose VFs' interrupts, it places itself.
function=${1##*/}
if physical=$(readlink "$1/physfn"); then function=${physical##*/}; fi
if grep -qsFx -e "$function" /var/lib/trackbed/irqbalance-banned; then echo ban=true; fi
exit 0
