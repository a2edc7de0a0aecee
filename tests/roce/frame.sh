# SPDX-License-Identifier: Apache-2.0
#
# Both rails carry a message, and by wire: what the kernel hands over inside itself does not count as packets of a veth.
packets() { cat /sys/class/net/h1r$1/statistics/tx_packets; }

for rail in 0 1; do
    before=$(packets $rail)
    timeout 300 ./rc_ping xh1r$rail 10.$rail.0.1 xh2r$rail 10.$rail.0.2 || exit 1
    sent=$(($(packets $rail) - before))
    echo "rail $rail: $sent packets"
    [ $sent -ge 4 ] || exit 1
done
