#!/bin/sh
# Make a release of this version: date the changelog, commit, and tag. Nothing is pushed.
#   tools/tag.sh 0.2.0
set -eu
cd "$(dirname "$0")/.."
version=${1:?the version, as in tools/tag.sh 0.2.0}
fail() { echo "no release: $1" >&2; exit 1; }
grep -qx "__version__ = \"$version\"" src/fedbilevel/__init__.py || fail "src/fedbilevel/__init__.py has another version"
grep -qx "version: $version" CITATION.cff || fail "CITATION.cff has another version"
[ -f "docs/releases/$version.md" ] || fail "docs/releases/$version.md is missing"
grep -qx "## \[$version\] - unreleased" CHANGELOG.md || fail "CHANGELOG.md has no section [$version] - unreleased"
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed"
[ "$(git rev-parse --abbrev-ref HEAD)" = main ] || fail "this is not the branch main"
! git rev-parse -q --verify "refs/tags/v$version" > /dev/null || fail "the tag v$version exists"
sed -i.bak "s/^## \[$version\] - unreleased$/## [$version] - $(date -u +%Y-%m-%d)/" CHANGELOG.md && rm CHANGELOG.md.bak
git commit --quiet --message "Release $version" CHANGELOG.md
git tag --annotate "v$version" --message "fedbilevel $version" --message "See docs/releases/$version.md."
echo "tagged v$version; now: make package && git push --follow-tags"
