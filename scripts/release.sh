#!/usr/bin/env bash
# Checks that a version can be released, and with --do makes its tag and its wheel; pushes nothing.
#
#   bash scripts/release.sh 0.2.0          says what would be done
#   bash scripts/release.sh 0.2.0 --do     does it
#
# Before: set __version__ in mafrt/__init__.py, give the section "## 0.2.0, 2026-12-01" of CHANGELOG.md its day, commit.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"

fail() {
  echo "error: $*" >&2
  exit 2
}

version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "the version is '$version'; expected three numbers, as in: bash scripts/release.sh 0.2.0"
[ $# -le 2 ] && { [ -z "${2:-}" ] || [ "$2" = --do ]; } || fail "found '${*:2}' after the version; expected --do or nothing."
tag=v$version

[ -z "$(git status --porcelain)" ] || fail "the working tree has changes; commit them or put them aside first."
branch=$(git branch --show-current)
[ "$branch" = main ] || fail "the branch is '$branch'; releases are made on main."

stated=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' mafrt/__init__.py)
[ "$stated" = "$version" ] || fail "mafrt/__init__.py says '$stated'; set __version__ to $version and commit."

heading=$(grep -m1 '^## ' CHANGELOG.md || true)
[[ $heading =~ ^"## $version, "[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] ||
  fail "CHANGELOG.md begins with '$heading'; expected '## $version, YYYY-MM-DD'."
section=$(awk '/^## /{n++} n==1 && !/^## /' CHANGELOG.md)
[ -n "${section//[[:space:]]/}" ] || fail "the section $version of CHANGELOG.md is empty; say what changed."

! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || fail "there is a tag $tag already; choose a higher version."
newest=""
while read -r old; do
  grep -q "^## ${old#v}, " CHANGELOG.md || fail "the tag $old has no section '## ${old#v}, YYYY-MM-DD' in CHANGELOG.md; add it."
  newest=$old
done < <(git tag --list 'v[0-9]*' --sort=v:refname)
if [ -n "$newest" ] && [ "$(printf '%s\n' "${newest#v}" "$version" | sort -V | tail -1)" != "$version" ]; then
  fail "the newest tag is $newest; expected a version above it, found $version."
fi

echo "$tag: $(git rev-parse --short HEAD), after ${newest:-no release}"
if [ "${2:-}" != --do ]; then
  echo "Would make the tag with this text, and the wheel in dist/; nothing was done. With --do it is."
  echo "$section"
  exit 0
fi
git tag --annotate --cleanup=verbatim --message "mafrt $version
$section" "$tag"
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
"$python" -m pip wheel -q --no-deps --wheel-dir dist . || {
  git tag --delete "$tag" >/dev/null
  fail "the wheel could not be built, so the tag was taken back; the lines above say why."
}
echo "Made $tag and $(ls -t dist/*.whl | head -1). Publish with: git push origin main $tag"
