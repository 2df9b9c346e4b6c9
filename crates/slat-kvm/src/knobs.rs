//! Files of sysfs that a run sets, and that get their values back when it ends.

use std::fs;
use std::path::{Path, PathBuf};

/// The files that were set, with the values that they had.
#[derive(Debug)]
pub(crate) struct Knobs {
    before: Vec<(PathBuf, String)>,
}

impl Knobs {
    /// Sets the files of a folder, in this order.
    ///
    /// # Errors
    /// The first file that cannot be read or written, and why. The others have their values back.
    pub fn set(folder: &str, values: &[(&str, &str)]) -> Result<Self, String> {
        let mut knobs = Self { before: Vec::new() };
        for (name, value) in values {
            let path = Path::new(folder).join(name);
            let failed = |error| format!("{}: {error}", path.display());
            let before = fs::read_to_string(&path).map_err(failed)?;
            fs::write(&path, value).map_err(failed)?;
            knobs.before.push((path, before.trim().to_owned()));
        }
        Ok(knobs)
    }

    /// Checks that a file of a folder can be written.
    ///
    /// # Errors
    /// Why not.
    pub fn check(folder: &str, name: &str) -> Result<(), String> {
        let path = Path::new(folder).join(name);
        let opened = fs::File::options().write(true).open(&path);
        opened.map(drop).map_err(|error| format!("{}: {error}", path.display()))
    }
}

impl Drop for Knobs {
    fn drop(&mut self) {
        // In the reverse order, so that what was switched on last goes first. `drop` cannot report
        // that the kernel refuses.
        for (path, before) in self.before.iter().rev() {
            let _ = fs::write(path, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_get_their_values_back_also_where_one_cannot_be_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        fs::write(&path, "0\n").unwrap();
        let name = folder.path().to_str().unwrap();
        let read = || fs::read_to_string(&path).unwrap();
        let knobs = Knobs::set(name, &[("run", "1")]).unwrap();
        assert_eq!(read(), "1");
        drop(knobs);
        assert_eq!(read(), "0");
        let refused = Knobs::set(name, &[("run", "1"), ("other", "1")]).unwrap_err();
        assert!(refused.contains("other") && read() == "0", "{refused}");
        assert!(Knobs::check(name, "run").is_ok() && Knobs::check(name, "other").is_err());
    }
}
