//! Debian's source trees of Linux, downloaded once and kept in the cache.

use crate::vm::{Architecture, Archive, Request, Teller, kept};
use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// Names of source trees, and the suite that has each.
pub const SOURCES: [(&str, &str); 3] =
    [("debian-6.1", "bookworm"), ("debian-6.12", "trixie"), ("debian-7.3", "experimental")];

/// Returns the source tree `name` from the cache, and downloads it first if necessary. Returns
/// `None` if there is no such name.
///
/// # Errors
/// The tree cannot be downloaded or unpacked.
pub fn linux_source(
    name: &str,
    stop: &AtomicBool,
    tell: Teller,
) -> anyhow::Result<Option<PathBuf>> {
    let Some((name, suite)) = SOURCES.into_iter().find(|(known, _)| *known == name) else {
        return Ok(None);
    };
    let tree = kept(&format!("sources/{name}"), |folder, tree| {
        (tell.say)(&format!("fetching the list of packages of Debian's {suite}"));
        let package = format!("linux-source-{}", name.trim_start_matches("debian-"));
        let architecture = Architecture::of_this_machine().unwrap_or(Architecture::X86_64).debian();
        let archive = Archive::open(Request { suite, architecture, folder, stop })?;
        (tell.note)(&format!("fetching {package}, about 150 MB"));
        (tell.say)(&format!("fetching {package}"));
        let unpacked = folder.join("package");
        archive.unpack(&package, &unpacked).with_context(|| {
            format!("Debian's {suite} has no {package} now; give a tree by its path")
        })?;
        (tell.say)(&format!("unpacking {package}, 1.7 GB"));
        unpack(&unpacked.join("usr/src").join(package + ".tar.xz"), tree)
    })?;
    Ok(Some(tree))
}

fn unpack(packed: &Path, into: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(into).with_context(|| format!("cannot make {}", into.display()))?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(packed).arg("--directory").arg(into);
    let output = tar.arg("--strip-components=1").output().context("cannot start tar")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().next_back().unwrap_or("it does not say why");
    ensure!(output.status.success(), "cannot unpack {}: {last}", packed.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_no_source_gives_none_and_a_bad_archive_an_error() {
        let stop = AtomicBool::new(false);
        let tell = Teller { say: &|_| {}, note: &|_| {} };
        assert!(linux_source("linux", &stop, tell).unwrap().is_none());
        let folder = tempfile::tempdir().unwrap();
        let packed = folder.path().join("a.tar.xz");
        std::fs::write(&packed, "no archive").unwrap();
        let error = unpack(&packed, &folder.path().join("tree")).unwrap_err().to_string();
        assert!(error.contains("a.tar.xz: tar:") || error.contains("a.tar.xz: xz"), "{error}");
    }
}
