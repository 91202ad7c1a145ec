#!/bin/sh
# The nightly gate, for any CI system: measure, judge, keep the reports, exit by the verdict.
#
#     sh ci/nightly.sh RESULTS
#
# RESULTS is a folder that outlives the job; each night becomes a folder in it. Set beforehand:
#   SPEC          what to run (default: nightly.toml beside this script)
#   POLICY        a shipped policy or a TOML file (default: nightly)
#   MINUTES       launches are added until every rule is decided, at most so long (default: 120)
#   PINNED        file with the name of the night that counts as right (default: pinned_night.txt
#                 beside this script; without it the trend is held against the oldest night)
#   INCONCLUSIVE  fail (default): a gate that stays open is seen; pass: say so and exit 0
#   EVALGATE      the command (default: evalgate)
#
# Exits 0 pass, 1 fail, 3 inconclusive, 4 invalid, and with evalgate's own code for anything else.
set -u

here=$(dirname "$0")
results=${1:?name the folder that keeps the nights: sh ci/nightly.sh RESULTS}
evalgate=${EVALGATE:-evalgate}
pinned=${PINNED:-$here/pinned_night.txt}
night=$results/$(date -u +%Y%m%dT%H%M%SZ)

case ${INCONCLUSIVE:-fail} in
    fail | pass) ;;
    *) echo "nightly: INCONCLUSIVE is '$INCONCLUSIVE': set fail or pass" >&2; exit 2 ;;
esac

"$evalgate" run "${SPEC:-$here/nightly.toml}" --out "$night" --policy "${POLICY:-nightly}" \
    --until-decided --max-minutes "${MINUTES:-120}"
code=$?

# What follows shows the night; it never changes its verdict.
printf '%s\n' "$night" > "$results/latest.txt"
if [ -s "$pinned" ]; then
    "$evalgate" trend "$results" --pinned "$(cat "$pinned")" --format html --out "$results/trend.html"
else
    "$evalgate" trend "$results" --format html --out "$results/trend.html"
fi || echo "nightly: no trend (see above)" >&2

case $code in
    0) echo "nightly: pass ($night)" ;;
    1) echo "nightly: FAIL ($night)" >&2 ;;
    3)
        echo "nightly: INCONCLUSIVE after ${MINUTES:-120} minutes ($night): the report says what" \
            "would settle it" >&2
        [ "${INCONCLUSIVE:-fail}" = pass ] && code=0
        ;;
    4) echo "nightly: INVALID, the evidence carries no verdict ($night)" >&2 ;;
    *) echo "nightly: no verdict, evalgate ended with $code ($night)" >&2 ;;
esac
exit "$code"
