//! Finds the mirror that this machine uses, from apt's sources in either of their formats
//! (sources.list(5)).

use anyhow::bail;
use std::fs;
use std::path::{Path, PathBuf};

/// Names of the suites of Debian's own archive. Other archives have other suites or other
/// components.
const SUITES: [&str; 12] = [
    "buster", "bullseye", "bookworm", "trixie", "forky", "duke", "sid", "stable", "oldstable",
    "oldoldstable", "testing", "unstable",
];

/// A mirror of Debian's archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// Its address, as in apt's sources.
    pub uri: String,
    /// The key that verifies its signatures, as in `Signed-By`; `None` for apt's trusted keys.
    pub signed_by: Option<String>,
}

impl Mirror {
    /// Returns the mirror that this machine's apt uses.
    ///
    /// # Errors
    /// apt is not configured, or none of its sources is Debian's archive.
    pub fn of_this_machine() -> anyhow::Result<Self> {
        Self::below(Path::new("/etc/apt"))
    }

    fn below(folder: &Path) -> anyhow::Result<Self> {
        let mut files = vec![folder.join("sources.list")];
        let parts = fs::read_dir(folder.join("sources.list.d"));
        let mut parts: Vec<PathBuf> =
            parts.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
        for file in &files {
            let Ok(text) = fs::read_to_string(file) else { continue };
            let found = match file.extension().and_then(|extension| extension.to_str()) {
                Some("list") => text.lines().find_map(line),
                Some("sources") => stanzas(&text).iter().find_map(|fields| stanza(fields)),
                _ => None,
            };
            if let Some(mirror) = found {
                return Ok(mirror);
            }
        }
        bail!(
            "none of apt's sources in {} is Debian's archive, so there is no mirror to fetch from",
            folder.display()
        )
    }

    /// Returns a source for one suite of this mirror, in apt's deb822 format.
    pub(crate) fn source(&self, suite: &str) -> String {
        let Self { uri, signed_by } = self;
        let mut text = format!(
            "Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\nTargets: Packages\n"
        );
        if let Some(signed_by) = signed_by {
            text += &format!("Signed-By: {signed_by}\n");
        }
        text + "\n"
    }
}

/// Returns whether these are suites and the main component of Debian's own archive.
fn is_debian<'a>(
    mut suites: impl Iterator<Item = &'a str>,
    mut components: impl Iterator<Item = &'a str>,
) -> bool {
    let own = |suite: &str| {
        let code = ["-updates", "-backports", "-proposed-updates"]
            .iter()
            .find_map(|suffix| suite.strip_suffix(suffix))
            .unwrap_or(suite);
        SUITES.contains(&code)
    };
    suites.any(own) && components.any(|component| component == "main")
}

/// Parses a line `deb [options] uri suite component...`, if its source is Debian's archive.
fn line(line: &str) -> Option<Mirror> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?;
    let rest = rest.strip_prefix(char::is_whitespace)?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    (is_remote(uri) && is_debian([suite].into_iter(), words))
        .then(|| Mirror { uri: uri.to_owned(), signed_by: signed_by.map(str::to_owned) })
}

/// Returns the stanzas of a deb822 file, each as its fields. Continuation lines keep their line
/// breaks, because a field can contain a whole key.
fn stanzas(text: &str) -> Vec<Vec<(String, String)>> {
    let mut stanzas = vec![Vec::<(String, String)>::new()];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields = stanzas.last_mut().expect("never empty");
        if line.trim().is_empty() {
            stanzas.push(Vec::new());
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    stanzas
}

/// Parses a stanza, if its source is Debian's archive.
fn stanza(fields: &[(String, String)]) -> Option<Mirror> {
    let field = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, value)| &**value);
    let words = |name: &str| field(name).unwrap_or_default().split_whitespace();
    let enabled = field("enabled").is_none_or(|value| !value.eq_ignore_ascii_case("no"));
    let uri = words("uris").find(|uri| is_remote(uri))?;
    let binary = words("types").any(|kind| kind == "deb");
    (enabled && binary && is_debian(words("suites"), words("components")))
        .then(|| Mirror { uri: uri.to_owned(), signed_by: field("signed-by").map(str::to_owned) })
}

/// Returns whether the source is a mirror with every suite. A disc has only some.
fn is_remote(uri: &str) -> bool {
    !uri.starts_with("cdrom:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> anyhow::Result<Mirror> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sources.list.d")).unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Mirror::below(folder.path())
    }

    #[test]
    fn the_line_of_debians_archive_is_taken_as_the_mirror() {
        let text = "# deb https://old.example/archive bookworm main\n\
                    deb cdrom:[Debian 12]/ bookworm main\n\
                    deb-src https://source.example/archive bookworm main\n\
                    deb https://containers.example/archive bookworm stable\n\
                    deb https://safe.example/archive-security bookworm-security main\n\
                    deb [arch=amd64 signed-by=/keys/d.gpg] https://a.example/archive bookworm \
                    main # own\n";
        let mirror = machine(&[("sources.list", text)]).unwrap();
        assert_eq!(mirror.uri, "https://a.example/archive");
        assert_eq!(mirror.signed_by.as_deref(), Some("/keys/d.gpg"));
    }

    #[test]
    fn a_stanza_of_debians_archive_is_the_mirror() {
        let text = "Types: deb\nURIs: https://off.example/archive\nSuites: trixie\n\
                    Components: main\nEnabled: no\n\n# own\nTypes: deb deb-src\n\
                    URIs: https://b.example/archive\nSuites: trixie trixie-updates\n\
                    Components: main contrib\n\
                    Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n";
        let files = [("sources.list", "# moved\n"), ("sources.list.d/debian.sources", text)];
        let mirror = machine(&files).unwrap();
        assert_eq!(mirror.uri, "https://b.example/archive");
        assert!(mirror.signed_by.unwrap().ends_with("keyring.gpg"));
    }

    #[test]
    fn a_key_inside_the_sources_goes_along_as_it_is() {
        let text = "Types: deb\nURIs: https://c.example/archive\nSuites: sid\nComponents: main\n\
                    Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n";
        let mirror = machine(&[("sources.list.d/c.sources", text)]).unwrap();
        let source = mirror.source("bookworm");
        assert!(source.contains("Suites: bookworm\n"), "{source}");
        assert!(
            source.contains("Signed-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n"),
            "{source}"
        );
    }

    #[test]
    fn a_machine_without_debians_archive_says_so() {
        let text = "deb https://other.example/ubuntu noble main\n";
        let error = machine(&[("sources.list", text)]).unwrap_err();
        assert!(error.to_string().contains("no mirror"), "{error}");
    }
}
