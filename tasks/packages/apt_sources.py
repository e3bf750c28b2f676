"""Finds the entries of apt's sources that already have a repository.

If two entries of one repository differ in Signed-By, apt reads no sources at all (debReleaseIndex::SetSignedBy in apt). The
guides of NVIDIA and Docker, and NVIDIA's package cuda-keyring, make entries with a Signed-By of their own. Which entries are of
one repository, and what each has, is asked of apt: it replaces $(ARCH), completes URIs, and leaves out what is disabled.

Tested: apt 2.6.1.
"""

from __future__ import annotations

from attrs import frozen
from pyinfra.api.command import StringCommand

from tasks.common.facts import FactBase

FINGERPRINTS = """
fingerprints() {  # arguments: a keyring, a home for gpg, `e` to leave out expired keys
  gpg --homedir "$2" --batch --quiet --with-colons --show-keys "$1" 2>/dev/null |
    awk -F: -v without="${3:-none}" '$1 == "pub" { primary = $2 != without } $1 == "fpr" && primary { print $10; primary = 0 }'
}
"""
"""The shell function ``fingerprints``. In gpg's colon format (doc/DETAILS) the second field of an expired key is `e`."""

# An entry is a line of a .list file, or a paragraph of a .sources file; apt numbers both. Signed-By has paths, fingerprints, or
# the key itself. Without Signed-By, apt accepts the keys in trusted.gpg and trusted.gpg.d.
_ENTRIES = (
    FINGERPRINTS
    + r"""
path=$1 text=$2
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
parts='' trusted='' rings='' native=''
eval "$(apt-config shell parts Dir::Etc::sourceparts/d trusted Dir::Etc::trusted/f rings Dir::Etc::trustedparts/d)"
eval "$(apt-config shell native APT::Architecture)"
mkdir -m 700 "$work/home"; mkdir "$work/others" "$work/ours"
for file in "$parts"*; do
  if [ -f "$file" ] && [ "${file##*/}" != "${path##*/}" ]; then ln -s "$file" "$work/others"; fi
done
printf '%s' "$text" >"$work/ours/${path##*/}"

targets() {
  folder=$1; shift
  format='$(BASE_URI) $(SOURCESENTRY) $(CREATED_BY) $(COMPONENT) $(ARCHITECTURE)'
  if ! apt-get indextargets --no-release-info -o Dir::Etc::sourceparts="$work/$folder" "$@" --format "$format" \
    >"$work/$folder.targets" 2>"$work/errors"; then
    sed -n "s,$work/others/,$parts,g; s/^E: /broken /p" "$work/errors" | awk '!seen[$0]++'
    exit
  fi
}
signed_by() {  # apt leaves out quotes, and white space at the end of a line, such as that of Windows
  awk -v wanted="$2" -v paragraphs="$3" '
    { sub(/[ \t\r]+$/, "") }
    !paragraphs { gsub(/"/, "") }
    !paragraphs && FNR == wanted && match($0, /\[[^]]*\]/) {
      count = split(substr($0, RSTART + 1, RLENGTH - 2), options)
      for (i = 1; i <= count; i++) if (tolower(options[i]) ~ /^signed-by=/) print substr(options[i], 11)
    }
    !paragraphs || /^#/ { next }
    /^$/ { within = field = 0; next }
    !within { within = 1; number++ }
    /^[^ \t]/ { field = tolower($0) ~ /^signed-by:/; sub(/^[^:]*:/, "") }
    number == wanted && field { sub(/^[ \t]+/, ""); if ($0 != "") print $0 == "." ? "" : $0 }' "$1"
}
keys() {
  if grep -q 'BEGIN PGP' "$work/signed"; then
    fingerprints "$work/signed" "$work/home" e
  elif [ -s "$work/signed" ]; then
    tr -s ', \t' '\n' <"$work/signed" | while read -r each; do
      case $each in /*) fingerprints "$each" "$work/home" e ;; *) printf '%s\n' "${each%!}" | tr a-f A-F ;; esac
    done
  else
    for each in "$trusted" "$rings"*.gpg "$rings"*.asc; do if [ -f "$each" ]; then fingerprints "$each" "$work/home" e; fi; done
  fi
}

targets ours -o Dir::Etc::sourcelist=/dev/null
targets others
# To apt two addresses are one repository if its files for them have one name: scheme, user and password do not count
# (URItoFileName in apt). A flat repository has no components: apt leaves its variables as they are. Packages of another
# architecture are not installed.
awk -v native="$native" '
  { sub(/^[^:\/]*:/, ""); sub(/^\/\/[^\/ ]*@/, "//"); sub(/^\/\/\//, "/") }
  $3 == "Packages" && $5 != native && $5 !~ /^\$/ { $3 = "Other" }
  { index_of = $4 ~ /^\$/ ? "packages" : $4 }
  NR == FNR { repositories[$1]; if ($3 == "Packages") ours[index_of]; next }
  $1 in repositories { if (!($2 in seen)) print "entry " $2; seen[$2]; if ($3 == "Packages") delete ours[index_of] }
  END { for (each in ours) print "lacks " each }' "$work/ours.targets" "$work/others.targets" >"$work/found"
command -v gpg >/dev/null || echo unread
while read -r what name; do
  case $what in lacks) echo "lacks $name"; continue ;; esac
  file=${name%:*} paragraphs=
  case $file in "$work"/*) file=$parts${file##*/} ;; esac
  case $file in *.sources) paragraphs=yes ;; esac
  echo "entry $file:${name##*:}"
  signed_by "$file" "${name##*:}" "$paragraphs" >"$work/signed"
  keys | sed 's/^/key /'
done <"$work/found"
"""
)


@frozen
class Entry:
    """An entry, by its file and its number there, with the fingerprints of the keys that apt accepts for it."""

    name: str
    keys: frozenset[str]


@frozen
class Entries:
    """The entries of a repository apart from the deploy's own.

    ``lacks``: the components that none of them has. ``broken``: why apt reads no sources, even without
    the deploy's own; empty if it does. ``read``: the keys could be read; without gpg they cannot.
    """

    there: tuple[Entry, ...] = ()
    lacks: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    read: bool = True

    def fault(self, fingerprint: str) -> str | None:
        """Why the repository cannot be used by these entries; None if it can, or if there are none."""
        if self.broken:
            return f"apt cannot read its sources: {'; '.join(self.broken)}; mend them, and deploy again"
        for entry in self.there:
            if self.read and fingerprint not in entry.keys:
                return (
                    f"{entry.name} has this repository, but not with the key {fingerprint}, and apt reads no sources if two "
                    "entries of a repository have different keys; remove that entry, or give it a Signed-By with this key"
                )
        if self.there and self.lacks:
            names = ", ".join(entry.name for entry in self.there)
            return f"{names}: this repository is there without {', '.join(self.lacks)}; add that, or remove the entry"
        return None


class RepositoryEntries(FactBase[Entries]):
    """The entries of apt's sources, apart from one file, that have the repository of that file."""

    default = Entries

    def command(self, path: str, text: str) -> StringCommand:
        """Ask apt for the indexes of the entry in this file, and of all others."""
        return self.script(_ENTRIES, path, text)

    def process(self, output: list[str]) -> Entries:
        """Parse the script's lines."""
        entries: list[tuple[str, set[str]]] = []
        other: dict[str, list[str]] = {"lacks": [], "broken": [], "unread": []}
        for line in output:
            what, _, value = line.partition(" ")
            if what == "entry":
                entries.append((value, set()))
            elif what == "key":
                entries[-1][1].add(value)
            else:
                other[what].append(value)
        return Entries(
            tuple(Entry(name, frozenset(keys)) for name, keys in entries),
            tuple(sorted(other["lacks"])),
            tuple(other["broken"]),
            not other["unread"],
        )
