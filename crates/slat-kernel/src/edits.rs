//! A folder of edits: series in their order, and single semantic patches, `NAME.cocci`.

use crate::object::RustObject;
use crate::step::Step;
use crate::vm::kept;
use crate::{Error, Version};
use std::fs;
use std::path::{Path, PathBuf};

/// The file with a series' introduction; a folder that has it is a series.
const COVER: &str = "cover.md";
/// The file with the names of series that a series builds on, a line each.
const NEEDS: &str = "needs";
/// The file with the names of series that cannot be in one kernel with a series, a line each, with
/// the reason after a colon.
const NOT_WITH: &str = "not-with";
/// The file with an edit's description, which becomes its commit message.
const MESSAGE: &str = "message.md";

/// A folder of series of edits.
#[derive(Clone, Debug)]
pub struct Edits {
    folder: PathBuf,
    series: Vec<Series>,
    /// Semantic patches of folders that are no series: `FOLDER/NAME`. They are not listed.
    others: Vec<Series>,
    /// Names of those that cannot be read, and why.
    broken: Vec<(String, String)>,
}

/// Edits that belong together, each on top of the one before.
#[derive(Clone, Debug)]
pub struct Series {
    /// The name of its folder.
    pub name: String,
    /// Its introduction; the first line is its title.
    pub cover: String,
    /// Series whose edits come before its own.
    pub needs: Vec<String>,
    /// Series that it cannot be combined with, and why.
    pub not_with: Vec<(String, String)>,
    /// Its edits.
    pub edits: Vec<Edit>,
}

/// An edit, which becomes one patch.
#[derive(Clone, Debug)]
pub struct Edit {
    /// Its name, after that of its series.
    pub name: String,
    /// Its commit message; the first line is the subject.
    pub message: String,
    /// The steps that change files.
    pub steps: Vec<Step>,
    /// New files: their paths in the tree, and their text.
    pub files: Vec<(String, String)>,
    /// Objects of Rust, which a build compiles.
    pub objects: Vec<RustObject>,
    /// A diff that changes files, and the file that it was read from.
    pub diff: Option<(PathBuf, String)>,
    /// Its author, where it is somebody's patch.
    pub author: Option<Author>,
}

/// The name of all edits that only add selftests, which any tree can have.
pub const SELFTESTS: &str = "selftests";

/// The files of the folder `linux` of the sources, for a program that was copied without them.
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/edits.rs"));

/// Returns the folder of Slat's own edits: that of the sources, or a copy in the cache.
fn own() -> Result<PathBuf, Error> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("linux");
    if sources.is_dir() {
        return Ok(sources);
    }
    let hash = EMBEDDED.iter().fold(0, |hash: u32, (path, text)| {
        hash.rotate_left(1) ^ crc32fast::hash(path.as_bytes()) ^ crc32fast::hash(text.as_bytes())
    });
    kept(&format!("edits/{hash:08x}"), |_, folder| unpack(folder)).map_err(|error| Error::Io {
        what: "cannot write the edits to the cache".to_owned(),
        error: std::io::Error::other(format!("{error:#}")),
    })
}

/// Writes Slat's own edits to a folder.
fn unpack(folder: &Path) -> anyhow::Result<()> {
    for (path, text) in EMBEDDED {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// Author of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Author {
    /// `Name <address>`.
    pub from: String,
    /// A date by RFC 5322.
    pub date: String,
}

impl Edits {
    /// Reads the given folder, or Slat's own edits. What is malformed there is no error until it is
    /// asked for.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(folder: Option<&Path>) -> Result<Self, Error> {
        let folder = folder.map_or_else(own, |folder| Ok(folder.to_owned()))?;
        fs::read_dir(&folder).map_err(Error::io(format!("cannot read {}", folder.display())))?;
        let folder = fs::canonicalize(&folder).unwrap_or(folder);
        let (mut series, mut others, mut broken) = (Vec::new(), Vec::new(), Vec::new());
        let mut keep = |name: &str, read: Result<Option<Series>, Error>| {
            read.unwrap_or_else(|error| {
                broken.push((name.to_owned(), error.to_string()));
                None
            })
        };
        for path in entries(&folder) {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if path.join(COVER).exists() {
                series.extend(keep(name, Series::read(name.to_owned(), &path).map(Some)));
            } else if let Some(name) = name.strip_suffix(".cocci") {
                series.extend(keep(name, Series::single(name, &path)));
            } else if path.is_dir() {
                for patch in entries(&path) {
                    let own = patch.file_stem().and_then(|own| own.to_str()).unwrap_or_default();
                    if patch.extension().is_some_and(|of| of == "cocci") {
                        let name = format!("{name}/{own}");
                        others.extend(keep(&name, Series::single(&name, &patch)));
                    }
                }
            }
        }
        Ok(Self { folder, series, others, broken })
    }

    /// Returns the names of edits that cannot be read, and why.
    pub fn broken(&self) -> &[(String, String)] {
        &self.broken
    }

    /// Returns all series, by name, without the patches of folders that are no series.
    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// Returns the edits of these names, in this order. A name is a series; `SERIES/N` or
    /// `SERIES/N-NAME`, for the edits up to that one; a single patch, `NAME` or `FOLDER/NAME`; or
    /// [`SELFTESTS`], for those edits of all series that only add tests. Edits of series that a
    /// named one needs come before it, unless they were named before.
    ///
    /// # Errors
    /// [`Error::NoEdit`], also if an edit is named twice; [`Error::NotTogether`].
    pub fn find(&self, names: &[String]) -> Result<Vec<Edit>, Error> {
        let mut found: Vec<Edit> = Vec::new();
        for name in names.iter().filter(|name| *name != SELFTESTS) {
            let (series, last) =
                name.split_once('/').map_or((&**name, None), |(s, l)| (s, Some(l)));
            let known = self.series.iter().find(|known| known.name == series);
            for needed in known.iter().flat_map(|known| &known.needs) {
                let base = self.series.iter().find(|known| known.name == *needed);
                let base = base.ok_or_else(|| self.no(needed))?;
                if !found.iter().any(|edit| edit.is_of(needed)) {
                    found.extend_from_slice(&base.edits);
                }
            }
            let other = || self.others.iter().find(|other| other.name == *name);
            let edits = known.and_then(|series| series.up_to(last));
            let edits = edits.or_else(|| Some(&*other()?.edits)).ok_or_else(|| self.no(name))?;
            if edits.iter().any(|edit| found.iter().any(|other| other.name == edit.name)) {
                return Err(self.no(&format!("{name} a second time")));
            }
            found.extend_from_slice(edits);
        }
        self.together(&found)?;
        if names.iter().any(|name| name == SELFTESTS) {
            let all = self.series.iter().flat_map(|series| &series.edits);
            for test in all.filter(|edit| edit.is_selftest()) {
                if found.iter().all(|edit| edit.name != test.name) {
                    found.push(test.clone());
                }
            }
        }
        Ok(found)
    }

    /// Checks that all these edits can be in one kernel, whatever their order.
    fn together(&self, edits: &[Edit]) -> Result<(), Error> {
        let has = |name: &str| edits.iter().any(|edit| edit.is_of(name));
        for series in self.series.iter().filter(|series| has(&series.name)) {
            if let Some((other, why)) = series.not_with.iter().find(|(other, _)| has(other)) {
                let (one, other, why) = (series.name.clone(), other.clone(), why.clone());
                return Err(Error::NotTogether { one, other, why });
            }
        }
        Ok(())
    }

    fn no(&self, name: &str) -> Error {
        let is_it = |(broken, _): &&(String, String)| {
            broken == name || name.split('/').next() == Some(broken)
        };
        if let Some((broken, why)) = self.broken.iter().find(is_it) {
            return Error::Malformed { step: broken.into(), why: why.clone() };
        }
        let names: Vec<&str> = self.series.iter().map(|series| &*series.name).collect();
        let known = match names[..] {
            [] => "no series, which is a folder with cover.md".to_owned(),
            _ => format!("{}; a diff or a mail is given by --patch FILE", names.join(", ")),
        };
        Error::NoEdit { name: name.to_owned(), folder: self.folder.clone(), known }
    }
}

impl Series {
    /// Reads a single semantic patch as a series.
    fn single(name: &str, path: &Path) -> Result<Option<Self>, Error> {
        let edit = |step| Edit {
            name: name.to_owned(),
            message: name.to_owned(),
            steps: vec![step],
            files: Vec::new(),
            objects: Vec::new(),
            diff: None,
            author: None,
        };
        let step = Step::read(path)?;
        let series = |step| Self {
            name: name.to_owned(),
            cover: name.to_owned(),
            needs: Vec::new(),
            not_with: Vec::new(),
            edits: vec![edit(step)],
        };
        Ok(step.map(series))
    }

    fn read(name: String, folder: &Path) -> Result<Self, Error> {
        let cover = text(&folder.join(COVER))?;
        let needs = lines(&folder.join(NEEDS))?;
        let pair = |line: &String| {
            let (name, why) = line.split_once(':')?;
            Some((name.trim().to_owned(), why.trim().to_owned()))
        };
        let not_with = folder.join(NOT_WITH);
        let pairs: Option<Vec<_>> = lines(&not_with)?.iter().map(pair).collect();
        let why = "a line is `SERIES: why it cannot be in one kernel with it`".to_owned();
        let not_with = pairs.ok_or(Error::Malformed { step: not_with, why })?;
        let mut edits = Vec::new();
        let mut names: Vec<(u32, String)> = folders(folder)
            .into_iter()
            .filter_map(|name| Some((name.split('-').next()?.parse().ok()?, name)))
            .collect();
        names.sort();
        for (_, edit) in names {
            edits.push(Edit::read(format!("{name}/{edit}"), &folder.join(edit))?);
        }
        Ok(Self { name, cover, needs, not_with, edits })
    }

    /// Returns its title.
    pub fn title(&self) -> &str {
        title(&self.cover)
    }

    fn up_to(&self, last: Option<&str>) -> Option<&[Edit]> {
        let Some(last) = last else { return Some(&self.edits) };
        let is_it = |edit: &Edit| {
            let own = edit.name.rsplit('/').next().unwrap_or_default();
            own == last || own.split('-').next() == Some(last)
        };
        let at = self.edits.iter().position(is_it)?;
        Some(&self.edits[..=at])
    }
}

impl Edit {
    fn read(name: String, folder: &Path) -> Result<Self, Error> {
        let message = text(&folder.join(MESSAGE))?;
        let (mut steps, mut files, mut objects) = (Vec::new(), Vec::new(), Vec::new());
        for path in entries(folder) {
            if path.extension().is_some_and(|of| of == "rust") {
                let object = RustObject::parse(&path, &text(&path)?);
                let malformed = |why| Error::Malformed { step: path.clone(), why };
                objects.push(object.map_err(malformed)?);
            } else {
                steps.extend(Step::read(&path)?);
            }
        }
        new_files(&folder.join("files"), "", &mut files)?;
        if steps.is_empty() && files.is_empty() && objects.is_empty() {
            let why = "it changes nothing: no .cocci, no .lines, no .rust, no files/".to_owned();
            return Err(Error::Malformed { step: folder.to_owned(), why });
        }
        Ok(Self { name, message, steps, files, objects, diff: None, author: None })
    }

    /// Adds a person's sign-off, unless it is there.
    pub fn sign(&mut self, person: &str) {
        let line = format!("Signed-off-by: {person}");
        if self.message.lines().any(|known| known == line) {
            return;
        }
        let last = self.message.trim_end().lines().next_back().unwrap_or_default();
        let is_tag = last.split_once(": ").is_some_and(|(name, _)| name.ends_with("-by"));
        let gap = if is_tag { "\n" } else { "\n\n" };
        self.message = format!("{}{gap}{line}\n", self.message.trim_end());
    }

    /// Returns whether it is an edit of this series.
    fn is_of(&self, series: &str) -> bool {
        self.name.split_once('/').is_some_and(|(own, _)| own == series)
    }

    /// Returns whether it adds selftests, and changes nothing else.
    fn is_selftest(&self) -> bool {
        let stepped = self.steps.iter().flat_map(|step| &step.files);
        let added = self.files.iter().map(|(path, _)| path);
        let is_test = |path: &String| path.starts_with("tools/testing/selftests/");
        let adds = !self.files.is_empty() && self.objects.is_empty();
        adds && self.diff.is_none() && stepped.chain(added).all(is_test)
    }

    /// Returns its subject.
    pub fn subject(&self) -> &str {
        title(&self.message)
    }

    /// Returns its steps for trees of this version.
    pub fn steps_for(&self, version: Version) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(move |step| step.is_for(version))
    }
}

fn title(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim_start_matches('#').trim()
}

fn text(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(Error::io(format!("cannot read {}", path.display())))
}

/// Returns the lines of a file; none if it is not there.
fn lines(path: &Path) -> Result<Vec<String>, Error> {
    let text = if path.exists() { text(path)? } else { String::new() };
    Ok(text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

/// Returns the entries of a folder, sorted.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

fn folders(folder: &Path) -> Vec<String> {
    let folders = entries(folder).into_iter().filter(|path| path.is_dir());
    folders.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect()
}

fn new_files(folder: &Path, below: &str, into: &mut Vec<(String, String)>) -> Result<(), Error> {
    for path in entries(folder) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let place = if below.is_empty() { name.to_owned() } else { format!("{below}/{name}") };
        if path.is_dir() {
            new_files(&path, &place, into)?;
        } else {
            into.push((place, text(&path)?));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a folder with one series of two edits, which need no Coccinelle.
    pub(crate) fn series() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("README.md", "no series\n");
        write("walks/cover.md", "# KVM: walks\n\nWhy.\n");
        write("walks/1-lines/message.md", "KVM: one line\n\nBecause.\n");
        write(
            "walks/1-lines/a.lines",
            "# file: no | Kconfig\n# after: config KVM\n---\n\tselect X\n",
        );
        write("walks/2-file/message.md", "KVM: a file\n\nIt is new.\n");
        write("walks/2-file/files/virt/kvm/new.c", "int x;\n");
        folder
    }

    #[test]
    fn a_series_is_found_whole_or_up_to_one_of_its_edits() {
        let folder = series();
        let edits = Edits::read(Some(folder.path())).unwrap();
        let names = |asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(|&name| name.to_owned()).collect();
            let found = edits.find(&asked).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.into_iter().map(|edit| edit.name).collect::<Vec<_>>())
        };
        assert_eq!(edits.series()[0].title(), "KVM: walks");
        assert_eq!(names(&["walks"]).unwrap(), ["walks/1-lines", "walks/2-file"]);
        assert_eq!(names(&["walks/1"]).unwrap(), ["walks/1-lines"]);
        assert_eq!(names(&["walks/2-file"]).unwrap().len(), 2);
        assert!(names(&["walk"]).unwrap_err().contains("has walks"));
        assert!(names(&["walks/9"]).unwrap_err().contains("no edit is called walks/9"));
        assert!(names(&["walks/1", "walks"]).unwrap_err().contains("a second time"));
    }

    #[test]
    fn a_series_that_another_needs_comes_before_it() {
        let edits = Edits::read(None).unwrap();
        let names = |names: &[&str]| -> Vec<String> {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            edits.find(&names).unwrap().into_iter().map(|edit| edit.name).collect()
        };
        let both = names(&["lockless-ageing", "batched-ageing"]);
        assert!(both[0].starts_with("lockless-ageing/1-"), "{both:?}");
        assert_eq!(names(&["batched-ageing"]), both);
        // Power's bits of 64 pages need three others.
        let power = names(&["batched-ageing-power"]);
        assert!(power[0] == both[0] && both.iter().all(|name| power.contains(name)), "{power:?}");
        assert_eq!(names(&["lockless-ageing-power", "batched-ageing-power"]).len(), power.len());
    }

    #[test]
    fn series_that_do_not_work_together_are_refused_in_any_order() {
        let folder = series();
        let refusal = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let edits = Edits::read(Some(folder.path())).unwrap();
            edits.find(&names).map(|found| found.len()).map_err(|error| error.to_string())
        };
        for (path, text) in [("cover.md", "# Other\n"), ("1-x/message.md", "x\n")] {
            let path = folder.path().join("other").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let line = "# file: a\n# after: b\n---\nc\n";
        fs::write(folder.path().join("other/1-x/a.lines"), line).unwrap();
        assert_eq!(refusal(&["walks", "other"]), Ok(3));
        fs::write(folder.path().join("other/not-with"), "walks: both change a\n").unwrap();
        let said = refusal(&["walks/1", "other"]).unwrap_err();
        assert!(said.contains("other and walks") && said.ends_with("both change a"), "{said}");
        assert_eq!(refusal(&["other", "walks"]), Err(said));
        assert_eq!(refusal(&["other"]), Ok(1));
        fs::write(folder.path().join("other/not-with"), "walks\n").unwrap();
        assert!(refusal(&["other"]).unwrap_err().contains("why it cannot be"));
    }

    #[test]
    fn the_engine_is_not_combined_with_what_walks_the_tables_of_c() {
        let edits = Edits::read(None).unwrap();
        for series in edits.series() {
            let others = series.needs.iter().chain(series.not_with.iter().map(|(name, _)| name));
            for name in others {
                assert!(edits.series().iter().any(|known| known.name == *name), "no {name}");
            }
        }
        for other in ["batched-ageing", "clear-under-read-lock"] {
            let both = [other.to_owned(), "slat-engine".to_owned()];
            assert!(matches!(edits.find(&both), Err(Error::NotTogether { .. })), "{other}");
        }
        let both = ["lockless-ageing".to_owned(), "slat-engine".to_owned()];
        assert!(edits.find(&both).is_ok());
    }

    #[test]
    fn a_semantic_patch_may_stand_alone() {
        let folder = series();
        let path = folder.path().join("mine.cocci");
        fs::write(&path, "// file: a.c\n// leaves: b\n@@\n@@\n-a\n+b\n").unwrap();
        let edits = Edits::read(Some(folder.path())).unwrap();
        assert_eq!(edits.find(&["mine".to_owned()]).unwrap()[0].name, "mine");
        // A patch in a folder that is no series can be named, and is not listed.
        fs::create_dir(folder.path().join("bugs")).unwrap();
        fs::copy(&path, folder.path().join("bugs/own.cocci")).unwrap();
        let edits = Edits::read(Some(folder.path())).unwrap();
        assert_eq!(edits.find(&["bugs/own".to_owned()]).unwrap()[0].name, "bugs/own");
        assert!(edits.find(&["bugs".to_owned()]).is_err());
        assert!(edits.series().iter().all(|series| !series.name.starts_with("bugs")));
        fs::write(&path, "// leaves: b\n@@\n@@\n-a\n+b\n").unwrap();
        let edits = Edits::read(Some(folder.path())).unwrap();
        let error = edits.find(&["mine".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("mine.cocci") && error.contains("file: PATH"), "{error}");
        assert!(edits.find(&["walks".to_owned()]).is_ok(), "others are as they were");
        assert_eq!(edits.broken().len(), 1);
    }

    #[test]
    fn selftests_of_all_series_go_into_any_tree_once() {
        let edits = Edits::read(None).unwrap();
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let found = edits.find(&names).unwrap();
            found.into_iter().map(|edit| edit.name).collect::<Vec<_>>()
        };
        let tests = names(&[SELFTESTS]);
        assert!(tests.iter().all(|name| name.ends_with("_test")), "{tests:?}");
        assert!(tests.contains(&"lockless-ageing/7-ageing_race_test".to_owned()), "{tests:?}");
        let with = names(&[SELFTESTS, "lockless-ageing"]);
        assert_eq!(with.len(), names(&["lockless-ageing"]).len() + tests.len() - 1, "{with:?}");
    }

    #[test]
    fn an_edit_that_changes_nothing_is_an_error() {
        let folder = series();
        fs::create_dir(folder.path().join("walks/3-none")).unwrap();
        fs::write(folder.path().join("walks/3-none/message.md"), "KVM: nothing\n").unwrap();
        let edits = Edits::read(Some(folder.path())).unwrap();
        let error = edits.find(&["walks/1".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("changes nothing"), "{error}");
    }

    #[test]
    fn a_program_without_its_sources_has_the_edits() {
        let folder = tempfile::tempdir().unwrap();
        unpack(folder.path()).unwrap();
        let names = |edits: Edits| -> Vec<String> {
            edits.series().iter().map(|series| series.name.clone()).collect()
        };
        let copied = Edits::read(Some(folder.path())).unwrap();
        assert!(copied.broken().is_empty() && folder.path().join("COPYING").exists());
        assert_eq!(names(copied), names(Edits::read(None).unwrap()));
        let error = Edits::read(Some(&folder.path().join("none"))).unwrap_err().to_string();
        assert!(error.contains("cannot read"), "{error}");
    }
}
