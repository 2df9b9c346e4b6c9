//! A tree with edits, in memory.

use crate::step::StepFailure;
use crate::{Edit, Error, Tree, Version, diff};
use std::collections::{BTreeMap, BTreeSet};

/// A source of files to edit.
pub trait Files {
    /// Returns the tree's name in results.
    fn name(&self) -> &str;
    /// Returns the tree's version.
    fn version(&self) -> Version;
    /// Returns the text of a file; `None` if it does not exist.
    fn read(&self, path: &str) -> Option<String>;
    /// Returns whether missing files are no error: then the rest of an edit is applied.
    fn is_part(&self) -> bool {
        false
    }
}

impl Files for Tree {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> Version {
        self.version
    }

    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path.join(path)).ok()
    }
}

/// A file before and after the edits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path in the tree.
    pub path: String,
    /// Its text before; `None` if it is new.
    pub before: Option<String>,
    /// Its text after; `None` if it is gone.
    pub after: Option<String>,
}

/// A tree with edits applied.
#[derive(Clone, Debug)]
pub struct EditedTree {
    /// Each edit, and what it changed.
    pub patches: Vec<(Edit, Vec<Change>)>,
    /// The complete files that differ from the tree's.
    pub files: BTreeMap<String, String>,
    /// The tree's files that are gone.
    pub removed: BTreeSet<String>,
}

impl EditedTree {
    /// Applies edits in their order.
    ///
    /// # Errors
    /// [`Error::DoesNotApply`] with the edit, its step and the file; [`Error::NoCoccinelle`].
    pub fn new(tree: &dyn Files, edits: Vec<Edit>) -> Result<Self, Error> {
        let mut this =
            Self { patches: Vec::new(), files: BTreeMap::new(), removed: BTreeSet::new() };
        for edit in edits {
            let changes = this.apply(tree, &edit)?;
            this.patches.push((edit, changes));
        }
        Ok(this)
    }

    /// Returns the tree with the first `count` of these edits.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        let patches: Vec<_> = self.patches.iter().take(count).cloned().collect();
        let mut this = Self { patches, files: BTreeMap::new(), removed: BTreeSet::new() };
        for change in self.patches.iter().take(count).flat_map(|(_, changes)| changes) {
            this.set(&change.path, change.after.clone());
        }
        this
    }

    fn set(&mut self, path: &str, text: Option<String>) {
        match text {
            Some(text) => {
                self.removed.remove(path);
                self.files.insert(path.to_owned(), text);
            }
            None => {
                self.files.remove(path);
                self.removed.insert(path.to_owned());
            }
        }
    }

    fn apply(&mut self, tree: &dyn Files, edit: &Edit) -> Result<Vec<Change>, Error> {
        let mut before: BTreeMap<String, Option<String>> = BTreeMap::new();
        for step in edit.steps_for(tree.version()) {
            let does_not = |file: &str, why: String| Error::DoesNotApply {
                edit: edit.name.clone(),
                tree: tree.name().to_owned(),
                file: file.to_owned(),
                step: step.path.clone(),
                why,
            };
            let found = step.files.iter().find_map(|file| Some((file, self.read(tree, file)?)));
            let Some((file, text)) = found else {
                if tree.is_part() {
                    continue;
                }
                return Err(does_not(&step.files.join(" or "), "it is not there".to_owned()));
            };
            let after = step.apply(&text).map_err(|failed| match failed {
                StepFailure::Why(why) => does_not(file, why),
                StepFailure::Other(error) => error,
            })?;
            before.entry(file.clone()).or_insert(Some(text));
            self.set(file, Some(after));
        }
        for (file, text) in edit.files.iter().filter(|_| !tree.is_part()) {
            if self.read(tree, file).is_some() {
                return Err(Error::DoesNotApply {
                    edit: edit.name.clone(),
                    tree: tree.name().to_owned(),
                    file: file.clone(),
                    step: "files".into(),
                    why: "the tree has a file of this name already".to_owned(),
                });
            }
            before.insert(file.clone(), None);
            self.set(file, Some(text.clone()));
        }
        if let Some((source, text)) = &edit.diff {
            let after = diff::apply(text, &|path| self.read(tree, path));
            let after = after.map_err(|refused| Error::DoesNotApply {
                edit: edit.name.clone(),
                tree: tree.name().to_owned(),
                file: refused.file,
                step: source.clone(),
                why: refused.why,
            })?;
            for (file, text) in after {
                before.insert(file.clone(), self.read(tree, &file));
                self.set(&file, text);
            }
        }
        let change = |(path, before): (String, Option<String>)| {
            let after = self.files.get(&path).cloned();
            Change { path, before, after }
        };
        Ok(before.into_iter().map(change).collect())
    }

    fn read(&self, tree: &dyn Files, path: &str) -> Option<String> {
        match self.removed.contains(path) {
            true => None,
            false => self.files.get(path).cloned().or_else(|| tree.read(path)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Edits;
    use crate::edits::tests::series;
    use std::fs;

    /// Returns a minimal tree.
    pub(crate) fn tree() -> (tempfile::TempDir, Tree) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("virt/kvm")).unwrap();
        fs::write(folder.path().join("Makefile"), "VERSION = 6\nPATCHLEVEL = 12\n").unwrap();
        fs::write(folder.path().join("Kconfig"), "config KVM\n\tbool\n").unwrap();
        let tree = Tree::open("small", folder.path()).unwrap();
        (folder, tree)
    }

    pub(crate) fn edited(tree: &Tree) -> EditedTree {
        let folder = series();
        let edits = Edits::read(Some(folder.path())).unwrap();
        EditedTree::new(tree, edits.find(&["walks".to_owned()]).unwrap()).unwrap()
    }

    #[test]
    fn edits_change_a_copy_in_memory_and_the_tree_stays_as_it_is() {
        let (folder, tree) = tree();
        let edited = edited(&tree);
        assert_eq!(edited.files["Kconfig"], "config KVM\n\tselect X\n\tbool\n");
        assert_eq!(edited.files["virt/kvm/new.c"], "int x;\n");
        assert_eq!(edited.patches[1].1[0].before, None);
        let text = fs::read_to_string(folder.path().join("Kconfig")).unwrap();
        assert_eq!(text, "config KVM\n\tbool\n");
    }

    #[test]
    fn the_first_edits_of_a_series_have_the_files_of_that_step() {
        let (_folder, tree) = tree();
        let all = edited(&tree);
        assert_eq!(all.first(all.patches.len()).files, all.files);
        assert!(all.first(0).files.is_empty() && all.first(0).patches.is_empty());
        let first = all.first(1);
        assert_eq!(first.files["Kconfig"], "config KVM\n\tselect X\n\tbool\n");
        assert!(!first.files.contains_key("virt/kvm/new.c"));
    }

    #[test]
    fn an_edit_without_its_place_is_an_error_that_names_the_file() {
        let (folder, tree) = tree();
        let edits = series();
        let refusal = || {
            let edits = Edits::read(Some(edits.path())).unwrap();
            let found = edits.find(&["walks".to_owned()]).unwrap();
            EditedTree::new(&tree, found).unwrap_err().to_string()
        };
        fs::write(folder.path().join("virt/kvm/new.c"), "other\n").unwrap();
        assert!(refusal().contains("virt/kvm/new.c: the tree has a file of this name"));
        fs::write(folder.path().join("Kconfig"), "config OTHER\n").unwrap();
        let text = refusal();
        assert!(
            text.contains("walks/1-lines") && text.contains("small: Kconfig: the line"),
            "{text}"
        );
        fs::remove_file(folder.path().join("Kconfig")).unwrap();
        assert!(refusal().contains("no or Kconfig: it is not there"));
    }
}
