#!/bin/sh
# Written by Trackbed. irqbalance runs this for each interrupt. $1 is the folder of the interrupt's device in sysfs.
# The agent writes the list of physical functions whose interrupts it places, together with those of their VFs.
function=${1##*/}
if physical=$(readlink "$1/physfn"); then function=${physical##*/}; fi
if grep -qsFx -e "$function" /var/lib/trackbed/irqbalance-banned; then echo ban=true; fi
exit 0
