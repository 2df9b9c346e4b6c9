//! The user's cache of downloaded files.

use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the directory `name` below `slat` in the user's cache. If it does not exist, `fetch`
/// makes it.
///
/// The arguments of `fetch` are an empty directory for its work, and the path of the directory to
/// make.
///
/// # Errors
/// `fetch` fails, or the cache cannot be written.
pub fn kept(
    name: &str,
    fetch: impl FnOnce(&Path, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    kept_below(&cache_folder()?, name, fetch)
}

/// As [`kept`], below another folder.
pub(crate) fn kept_below(
    folder: &Path,
    name: &str,
    fetch: impl FnOnce(&Path, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let kept = folder.join(name);
    if kept.is_dir() {
        return Ok(kept);
    }
    let beside = kept.parent().context("a name has a folder")?;
    let failed = || format!("cannot write to {}", beside.display());
    fs::create_dir_all(beside).with_context(failed)?;
    // In the same directory, so that the rename puts the whole result in place atomically.
    let work = tempfile::Builder::new().prefix(".fetching-").tempdir_in(beside);
    let work = work.with_context(failed)?;
    let tree = work.path().join("tree");
    fetch(work.path(), &tree)?;
    // Another process may have made it meanwhile.
    if let Err(error) = fs::rename(&tree, &kept)
        && !kept.is_dir()
    {
        return Err(error).with_context(failed);
    }
    Ok(kept)
}

/// Returns the directory `slat` of the user's cache (XDG Base Directory Specification).
///
/// # Errors
/// The environment names neither a cache nor a home directory.
pub fn cache_folder() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .map(|folder| folder.join("slat"))
        .context("neither XDG_CACHE_HOME nor HOME says where it could be kept")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn what_was_fetched_once_is_not_fetched_again() {
        let cache = tempfile::tempdir().unwrap();
        let fetch = |_: &Path, tree: &Path| -> anyhow::Result<()> {
            fs::create_dir(tree)?;
            Ok(fs::write(tree.join("file"), "contents")?)
        };
        let kept = kept_below(cache.path(), "things/one", fetch).unwrap();
        let again = kept_below(cache.path(), "things/one", |_, _| bail!("again")).unwrap();
        assert_eq!(kept, again);
        assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "contents");
    }

    #[test]
    fn what_failed_half_way_leaves_nothing_behind() {
        let cache = tempfile::tempdir().unwrap();
        let error = kept_below(cache.path(), "things/one", |_, tree: &Path| {
            fs::create_dir(tree)?;
            bail!("no network")
        });
        assert_eq!(error.unwrap_err().to_string(), "no network");
        assert_eq!(fs::read_dir(cache.path().join("things")).unwrap().count(), 0);
    }
}
