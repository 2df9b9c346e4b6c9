//! Edits to a copy of a tree: only those steps that change files which are compiled here.

use crate::linux::tree::{HEADER_FOLDER, PGTABLE, next_id};
use crate::linux::{Error, Tree};
use slat_kernel::{EditedTree, Edits, Files, Version};

impl Files for Tree {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> Version {
        self.version
    }

    fn read(&self, path: &str) -> Option<String> {
        if path == PGTABLE {
            return Some(self.pgtable.clone());
        }
        let name = path.strip_prefix(HEADER_FOLDER)?.strip_prefix('/')?;
        let (_, text) = self.headers.iter().find(|(header, _)| *header == name)?;
        Some(text.clone())
    }

    fn is_part(&self) -> bool {
        true
    }
}

impl Tree {
    /// Returns a copy with edits applied in their order; its name lists them.
    ///
    /// # Errors
    /// [`Error::Edit`].
    pub fn with(&self, edits: &Edits, names: &[String]) -> Result<Self, Error> {
        let edited = EditedTree::new(self, edits.find(names)?)?;
        let mut tree = Self { id: next_id(), ..self.clone() };
        if let Some(text) = edited.files.get(PGTABLE) {
            tree.pgtable.clone_from(text);
        }
        for (name, text) in &mut tree.headers {
            if let Some(edited) = edited.files.get(&format!("{HEADER_FOLDER}/{name}")) {
                text.clone_from(edited);
            }
        }
        tree.name = format!("{}+{}", self.name, names.join(","));
        Ok(tree)
    }
}
