//! Packs the published crates as for a registry, and builds them from the packages.

use crate::target;
use crate::workspace::{INSTALLED, Outcome, PUBLISHED, cargo, ran};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Packs the crates, and builds each from its package and from those that it depends on.
pub fn pack() -> anyhow::Result<Outcome> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    home.map_or(Ok(()), |home| forget_packed(&home.join("registry")))?;
    let mut pack = cargo(&["package", "--quiet", "--allow-dirty", "--target-dir"]);
    pack.arg(target().join("publish"));
    for name in all() {
        pack.args(["--package", name]);
    }
    // A package has no profile of this workspace, and nothing here is debugged.
    ran(pack.env("CARGO_PROFILE_DEV_DEBUG", "false"))
}

/// Returns the crates, each after those that it depends on.
fn all() -> impl Iterator<Item = &'static str> {
    PUBLISHED.into_iter().chain(INSTALLED)
}

/// Removes cargo's copies of crates that were packed before: cargo unpacks them by the path of the
/// local registry and by version, and would use an earlier state.
fn forget_packed(registry: &Path) -> io::Result<()> {
    let ours = |name: &str| {
        all().any(|published| {
            let version = name.strip_prefix(published).and_then(|rest| rest.strip_prefix('-'));
            version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    for kind in ["src", "cache"] {
        for source in entries(&registry.join(kind))? {
            // A registry without a host is a local one.
            if !source.file_name().is_some_and(|name| name.to_string_lossy().starts_with('-')) {
                continue;
            }
            for packed in entries(&source)? {
                match packed.file_name().is_some_and(|name| ours(&name.to_string_lossy())) {
                    true if packed.is_dir() => fs::remove_dir_all(&packed)?,
                    true => fs::remove_file(&packed)?,
                    false => {}
                }
            }
        }
    }
    Ok(())
}

/// Returns the entries of a folder; none if it does not exist.
fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_before_is_forgotten_and_nothing_else_is() {
        let registry = target().join("test-publish");
        let _ = fs::remove_dir_all(&registry);
        let file = |path: &str| {
            let path = registry.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let gone =
            [file("src/-1a2b/slat-0.1.0/Cargo.toml"), file("cache/-1a2b/slat-guest-0.1.0.crate")];
        let kept = [
            file("src/-1a2b/slat-other-0.1.0/Cargo.toml"),
            file("src/-1a2b/serde-1.0.0/Cargo.toml"),
            file("src/some.host-1a2b/slat-0.1.0/Cargo.toml"),
        ];
        forget_packed(&registry).unwrap();
        assert!(gone.iter().all(|path| !path.exists()));
        assert!(kept.iter().all(|path| path.exists()));
        fs::remove_dir_all(&registry).unwrap();
    }
}
