#!/bin/sh
# Take part as the site SITE, with the rows of client CLIENT of the problem to try. A real site has a site.toml of its own.
set -eu
KITS=${KITS:-/kits} APP=${APP:-/app} OWN=${OWN:-$HOME/site}
mkdir -p "$OWN"
cp "$APP/problem.py" "$OWN/"
if [ ! -f "$OWN/site.toml" ]; then
    sed -e "s/^client = 0/client = $CLIENT/" -e "s/^clients = 4/clients = 3/" "$APP/site.toml" > "$OWN/site.toml"
fi
cd "$OWN"
exec fedbilevel site site.toml --kit "$KITS/fedbilevel/prod_00/$SITE"
