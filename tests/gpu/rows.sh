# SPDX-License-Identifier: Apache-2.0
#
# To be sourced by scripts that run one part after the other within a time: LOGS/NAME.log for each, LOGS/summary.txt with a
# line for each, and how many passed, failed and were skipped. The script sets logs, and end in seconds of SECONDS.
passed=0 failed=0 skipped=0
: >"$logs/summary.txt"

say() { echo "$*" | tee -a "$logs/summary.txt"; }

# row NAME LIMIT [SETTING=VALUE]... COMMAND...: its output goes to LOGS/NAME.log; not begun when the time is up.
row() {
    local name=$1 limit=$2 left=$((end - SECONDS)) begun=$SECONDS status
    shift 2
    if [ "$left" -lt 5 ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    timeout -k 5 "$limit" env "$@" >"$logs/$name.log" 2>&1 </dev/null
    status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1)) && say "passed: $name, $((SECONDS - begun)) s"
    else
        failed=$((failed + 1))
        say "failed: $name (status $status), $((SECONDS - begun)) s"
        tail -n 15 "$logs/$name.log" | sed 's/^/    | /'
    fi
    return "$status"
}
