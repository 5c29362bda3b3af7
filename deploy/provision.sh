#!/bin/sh
# Make the kits of all participants and a problem to try, once. KITS and APP are volumes of the containers.
set -eu
KITS=${KITS:-/kits} APP=${APP:-/app} HERE=${HERE:-/deploy} SERVER=${SERVER:-server} PORT=${PORT:-8002}
if [ ! -d "$KITS/fedbilevel/prod_00" ]; then
    sed -e "s/name: server,/name: $SERVER,/" -e "s/8002/$PORT/" "$HERE/project.yml" > "$KITS/project.yml"
    nvflare provision -p "$KITS/project.yml" -w "$KITS"
fi
if [ ! -f "$APP/problem.py" ]; then
    fedbilevel new app --out "$APP/new"
    mv "$APP"/new/* "$APP"/ && rm -r "$APP/new"
fi
