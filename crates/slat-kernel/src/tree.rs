//! A Linux source tree on this machine.

use crate::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Version of a tree, from its Makefile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// `VERSION`.
    pub major: u32,
    /// `PATCHLEVEL`.
    pub minor: u32,
    /// `SUBLEVEL`.
    pub patch: u32,
}

impl Version {
    /// Reads the version from a Makefile.
    pub fn of(makefile: &str) -> Option<Self> {
        let of = |key: &str| {
            let value = |line: &str| {
                let value = line.strip_prefix(key)?.trim_start().strip_prefix('=')?;
                Some(value.trim().to_owned())
            };
            makefile.lines().find_map(value)?.parse().ok()
        };
        let (major, minor) = (of("VERSION")?, of("PATCHLEVEL")?);
        Some(Self { major, minor, patch: of("SUBLEVEL").unwrap_or(0) })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.trim().splitn(3, '.').map(str::parse);
        let mut next = || parts.next().transpose().map_err(|_| ());
        let major = next()?.ok_or(())?;
        Ok(Self { major, minor: next()?.unwrap_or(0), patch: next()?.unwrap_or(0) })
    }
}

/// A Linux source tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Its name: `debian-6.12`, or its path.
    pub name: String,
    /// Its top folder.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// Its commit, if it was taken out of a repository and nobody changes it.
    pub commit: Option<String>,
}

impl Tree {
    /// Opens a tree.
    ///
    /// # Errors
    /// [`Error::NoTree`].
    pub fn open(name: &str, path: &Path) -> Result<Self, Error> {
        let missing =
            |missing: &str| Error::NoTree { path: path.to_owned(), missing: missing.to_owned() };
        let makefile =
            std::fs::read_to_string(path.join("Makefile")).map_err(|_| missing("Makefile"))?;
        let version = Version::of(&makefile).ok_or_else(|| missing("the version in Makefile"))?;
        if !path.join("virt/kvm").is_dir() {
            return Err(missing("virt/kvm"));
        }
        let path = std::fs::canonicalize(path).map_err(Error::io("the tree's path"))?;
        Ok(Self { name: name.to_owned(), path, version, commit: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_makefile_says_the_version() {
        let found = Version::of("# no\nVERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 117\nX =\n");
        assert_eq!(found.unwrap().to_string(), "6.12.117");
        assert_eq!(Version::of("all:\n"), None);
        assert_eq!("6.12".parse(), Ok(Version { major: 6, minor: 12, patch: 0 }));
        assert!("six".parse::<Version>().is_err() && "".parse::<Version>().is_err());
    }

    #[test]
    fn what_is_missing_of_a_tree_is_named_with_what_to_give() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = || Tree::open("t", folder.path()).unwrap_err().to_string();
        assert!(refusal().contains("Makefile is missing; give the top folder"));
        std::fs::write(folder.path().join("Makefile"), "VERSION = 6\nPATCHLEVEL = 12\n").unwrap();
        assert!(refusal().contains("virt/kvm is missing"));
    }
}
