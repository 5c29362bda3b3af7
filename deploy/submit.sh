#!/bin/sh
# Submit the run of the problem to try, and go on with it if it was stopped.
set -eu
KITS=${KITS:-/kits} APP=${APP:-/app} RUNS=${RUNS:-/runs}
cd "$APP"
[ ! -f "$RUNS/first/checkpoint.safetensors" ] || more=--resume
exec fedbilevel federate spec.toml --set problem.clients=3 --set stop.iterations="${ITERATIONS:-10}" \
    --kit "$KITS/fedbilevel/prod_00/admin@example.org" --sites site-1,site-2,site-3 --out "$RUNS/first" ${more:-}
