//! Edits to a tree's copy, by Coccinelle's semantic patches: they find their place by what the code
//! does, so that one edit fits many versions.

use crate::{Error, Tree, Workshop};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder of semantic patches, `NAME.cocci` each.
#[derive(Clone, Debug)]
pub struct Edits {
    folder: PathBuf,
}

impl Edits {
    /// The folder that is given, or the one of the source that this was built from: the edits are
    /// under Linux's licence, so this crate does not contain them.
    pub fn new(folder: Option<&Path>) -> Self {
        let ours = || Path::new(env!("CARGO_MANIFEST_DIR")).join("edits");
        Self { folder: folder.map_or_else(ours, Path::to_owned) }
    }

    /// The names of all edits, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let name = |path: PathBuf| {
            (path.extension()? == "cocci").then(|| path.file_stem()?.to_str().map(str::to_owned))?
        };
        let mut names: Vec<String> = entries.filter_map(|entry| name(entry.path())).collect();
        names.sort();
        names
    }

    /// A copy of `tree` with the edits applied in their order; its name says so.
    ///
    /// # Errors
    /// [`Error::NoEdit`], [`Error::NoCoccinelle`], [`Error::DoesNotApply`].
    pub fn apply(&self, names: &[String], tree: &Tree, workshop: &Workshop) -> Result<Tree, Error> {
        let mut edited = Tree { id: crate::tree::next_id(), ..tree.clone() };
        for name in names {
            let patch = self.folder.join(format!("{name}.cocci"));
            if !self.names().contains(name) {
                let known = match self.names() {
                    none if none.is_empty() => "none; give the folder by --edits".to_owned(),
                    names => names.join(", "),
                };
                return Err(Error::NoEdit {
                    name: name.clone(),
                    folder: self.folder.clone(),
                    known,
                });
            }
            edited.pgtable = applied(&patch, name, &edited, workshop)?;
            edited.name += if edited.name == tree.name { "+" } else { "," };
            edited.name += name;
        }
        Ok(edited)
    }
}

fn applied(patch: &Path, name: &str, tree: &Tree, workshop: &Workshop) -> Result<String, Error> {
    if !Command::new("spatch").arg("--version").output().is_ok_and(|o| o.status.success()) {
        return Err(Error::NoCoccinelle);
    }
    let (before, after) = (workshop.path().join("before.c"), workshop.path().join("after.c"));
    std::fs::write(&before, &tree.pgtable).map_err(Error::io("cannot write the tree's copy"))?;
    let _ = std::fs::remove_file(&after);
    let mut spatch = Command::new("spatch");
    spatch.args(["--very-quiet", "--no-includes", "--sp-file"]).arg(patch);
    let output = spatch.arg(&before).arg("-o").arg(&after).output().map_err(Error::io("spatch"))?;
    let why =
        |why: String| Error::DoesNotApply { edit: name.to_owned(), tree: tree.name.clone(), why };
    let said = String::from_utf8_lossy(&output.stderr);
    // Nothing to change is an error to Coccinelle; here the marks below say what is missing.
    if !output.status.success() && !said.contains("no modified files") {
        return Err(why(said.lines().rev().take(3).collect::<Vec<_>>().join("; ")));
    }
    let text = std::fs::read_to_string(&after).unwrap_or_default();
    // Each rule of an edit says what it leaves behind, so that half of an edit is none.
    let marks = std::fs::read_to_string(patch).unwrap_or_default();
    let marks: Vec<&str> =
        marks.lines().filter_map(|line| line.strip_prefix("// leaves: ")).map(str::trim).collect();
    if marks.is_empty() {
        return Err(why(
            "it has no line `// leaves: TEXT`, which says what must come of it".to_owned()
        ));
    }
    let lacks = |text: &str| {
        marks.iter().find(|mark| !text.contains(**mark)).map(|mark| (*mark).to_owned())
    };
    if lacks(&tree.pgtable).is_none() {
        return Err(why("the tree has it already".to_owned()));
    }
    match lacks(&text) {
        None => Ok(text),
        Some(mark) => {
            Err(why(format!("its code is not what the edit looks for (no `{mark}` came of it)")))
        }
    }
}
