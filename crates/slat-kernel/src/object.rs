//! An object of Rust in a kernel: the engine with what Linux calls, compiled by rustc.
//!
//! A file `NAME.rust` of an edit names it. rustc compiles each crate with its own core for a target
//! without floating point, and optimises all of them as one. Of the library that comes of it only
//! the member of that optimisation is taken: the rest is what a kernel has itself. The linker
//! merges its sections, which would otherwise be orphans outside the kernel's text, and only the
//! entry points stay global.

use crate::Version;
use crate::step::range;
use anyhow::{Context, bail, ensure};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An object of Rust that an edit adds to a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RustObject {
    /// Its path in the tree.
    pub file: String,
    /// The folder of the crates.
    sources: PathBuf,
    /// rustc's name of the target.
    target: String,
    /// The prefix of the programs that link it.
    cross: String,
    /// The file with the entry points, in `slat-linux/kernel`.
    entry: String,
    /// The engine's format, a feature.
    format: String,
    /// The first version that it is for, and the first that it is no longer for.
    versions: (Option<Version>, Option<Version>),
    /// Options of a kernel that it cannot be part of, and why.
    refuses: Vec<(String, String)>,
}

/// Prefix of the entry points.
const ENTRY: &str = "slat_kvm_";

/// Sections that a kernel does not want.
const REMOVED: [&str; 7] = [
    ".comment", ".eh_frame", ".rela.eh_frame", ".llvm_addrsig", ".llvmbc", ".llvmcmd",
    ".note.GNU-stack",
];

impl RustObject {
    /// Parses a file that names an object; paths in it are relative to the file.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, String> {
        let lines = || text.lines().filter_map(|line| line.strip_prefix("# ")?.split_once(": "));
        let one = |key: &str| {
            let found = lines().find(|(found, _)| *found == key);
            found.map(|(_, value)| value.trim().to_owned()).ok_or(format!("it has no `# {key}:`"))
        };
        let folder = path.parent().unwrap_or(path);
        let refused = lines().filter(|(key, _)| *key == "refuses");
        let refused = refused.filter_map(|(_, value)| value.split_once(", as "));
        Ok(Self {
            file: one("file")?,
            sources: folder.join(one("sources")?),
            target: one("target")?,
            cross: one("cross")?,
            entry: one("entry")?,
            format: one("format")?,
            versions: one("versions").map_or(Ok((None, None)), |text| range(&text))?,
            refuses: refused.map(|(option, why)| (option.to_owned(), why.to_owned())).collect(),
        })
    }

    /// Returns whether it is for trees of this version.
    pub(crate) fn is_for(&self, version: Version) -> bool {
        let (from, until) = self.versions;
        from.is_none_or(|from| version >= from) && until.is_none_or(|until| version < until)
    }

    /// Checks that a configuration has no option that the object cannot be linked with.
    pub(crate) fn check(&self, config: &str) -> anyhow::Result<()> {
        for (option, why) in &self.refuses {
            let set = format!("{option}=y");
            ensure!(
                !config.lines().any(|line| line.trim() == set),
                "{}: it cannot be part of a kernel with {option}, as {why}; turn the option off",
                self.file
            );
        }
        Ok(())
    }

    /// Builds the object for a kernel with these options, or returns the one that was built before
    /// from the same sources.
    pub(crate) fn build(&self, options: &str, folder: &Path) -> anyhow::Result<Vec<u8>> {
        self.check(options)?;
        let page = ["CONFIG_ARM64_16K_PAGES=y", "CONFIG_ARM64_64K_PAGES=y"];
        let page = page.iter().position(|page| options.lines().any(|line| line == *page));
        let page = page.map(|at| ["page_16k", "page_64k"][at]);
        let rustc = self.rustc()?;
        let mut hasher = DefaultHasher::new();
        (&rustc, &self.target, &self.entry, &self.format, page).hash(&mut hasher);
        for krate in ["slat", "slat-linux"] {
            hash(&self.sources.join(krate), &mut hasher)?;
        }
        let folder = folder.join("rust");
        let kept = folder.join(format!("{:016x}.o", hasher.finish()));
        if let Ok(bytes) = fs::read(&kept) {
            return Ok(bytes);
        }
        fs::create_dir_all(&folder).context("cannot make a folder for Rust's objects")?;
        let work = tempfile::tempdir_in(&folder).context("cannot make a folder")?;
        let object = self.compile(page, work.path())?;
        let bytes = fs::read(object).context("cannot read the object")?;
        let new = work.path().join("new.o");
        fs::write(&new, &bytes).and_then(|()| fs::rename(&new, &kept)).context("cannot keep it")?;
        Ok(bytes)
    }

    /// Returns what rustc says of its version.
    fn rustc(&self) -> anyhow::Result<String> {
        let said = ran(Command::new("rustc").arg("-vV")).context("rustc is needed")?;
        let args = ["--print", "target-libdir", "--target", &self.target];
        let library = ran(Command::new("rustc").args(args))?;
        ensure!(
            Path::new(library.trim()).is_dir(),
            "rustc has no core for {target}; install it: `rustup target add {target}`",
            target = self.target
        );
        Ok(said)
    }

    /// Compiles and links; returns the object's path.
    fn compile(&self, page: Option<&str>, work: &Path) -> anyhow::Result<PathBuf> {
        let entry = format!("slat-linux/kernel/{}", self.entry);
        let feature = format!("feature=\"{}\"", self.format);
        let crates = [
            ("slat", "slat/src/lib.rs", "rlib"),
            ("slat_linux", "slat-linux/src/lib.rs", "rlib"),
            ("slat_entry", &*entry, "staticlib"),
        ];
        for (at, (name, source, kind)) in crates.into_iter().enumerate() {
            let mut rustc = Command::new("rustc");
            rustc.args(crates[..at].iter().flat_map(|(name, ..)| ["--extern", name]));
            rustc.args(["--edition", "2024", "--target", &self.target, "--cap-lints", "allow"]);
            for option in [
                "opt-level=3",
                "panic=abort",
                "force-unwind-tables=no",
                "relocation-model=static",
                "codegen-units=1",
                "embed-bitcode=yes",
            ] {
                rustc.args(["-C", option]);
            }
            if kind == "staticlib" {
                rustc.args(["-C", "lto=fat"]);
            }
            rustc.args(page.into_iter().flat_map(|page| ["--cfg", page]));
            // The engine's other formats are not compiled.
            rustc.args(["--cfg", &feature, "--crate-name", name, "--crate-type", kind]);
            rustc.arg(self.sources.join(source)).arg("--out-dir").arg(work).arg("-L").arg(work);
            ran(&mut rustc)?;
        }
        let tool = |name: &str| {
            let mut tool = Command::new(format!("{}{name}", self.cross));
            tool.current_dir(work);
            tool
        };
        let members = ran(tool("ar").args(["t", "libslat_entry.a"]))?;
        let members: Vec<&str> =
            members.lines().filter(|name| name.starts_with("slat_entry")).collect();
        ran(tool("ar").args(["x", "libslat_entry.a"]).args(&members))?;
        let symbols = ran(tool("nm").args(["--defined-only", "-g"]).args(&members))?;
        let entries: Vec<&str> = symbols
            .lines()
            .filter_map(|line| line.rsplit(' ').next())
            .filter(|name| name.starts_with(ENTRY))
            .collect();
        ensure!(!entries.is_empty(), "the object has no entry point: {symbols}");
        let mut link = tool("ld");
        link.args(["-r", "--gc-sections", "-T"]);
        link.arg(self.sources.join("slat-linux/kernel/merge.ld"));
        link.args(entries.iter().flat_map(|entry| ["-u", entry])).args(&members);
        ran(link.args(["-o", "all.o"]))?;
        let mut strip = tool("objcopy");
        strip.args(entries.iter().map(|entry| format!("--keep-global-symbol={entry}")));
        strip.arg("--strip-unneeded").args(REMOVED.iter().flat_map(|section| ["-R", section]));
        ran(strip.args(["all.o", "object.o"]))?;
        Ok(work.join("object.o"))
    }
}

/// Hashes the sources of a crate.
fn hash(path: &Path, hasher: &mut DefaultHasher) -> anyhow::Result<()> {
    let failed = || {
        format!(
            "cannot read {}: the object is built from Slat's sources; give their edits by --edits \
             SOURCES/linux",
            path.display()
        )
    };
    let mut entries = fs::read_dir(path).with_context(failed)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            if name != "tests" && name != "target" {
                hash(&path, hasher)?;
            }
        } else if path.extension().is_some_and(|of| of == "rs" || of == "ld") {
            (name, fs::read(&path)?).hash(hasher);
        }
    }
    Ok(())
}

/// Runs a program, and returns its output; an error has the end of what it said.
fn ran(command: &mut Command) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = said.lines().rev().take(20).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        bail!("{program} failed:\n{}", last.join("\n"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# The engine.\n# file: arch/x/slat.o_shipped\n# sources: ../crates\n\
                        # target: none\n# cross: x-\n# entry: e.rs\n# format: f\n\
                        # refuses: CONFIG_BAD, as it would break\n";

    #[test]
    fn an_object_is_named_by_its_file() {
        let object = RustObject::parse(Path::new("/e/1/engine.rust"), TEXT).unwrap();
        assert_eq!(object.file, "arch/x/slat.o_shipped");
        assert_eq!(object.sources, Path::new("/e/1/../crates"));
        let error = RustObject::parse(Path::new("/e"), "# file: x\n").unwrap_err();
        assert!(error.contains("# sources"), "{error}");
    }

    #[test]
    fn an_object_is_for_the_versions_that_it_names_or_for_all() {
        let parse = |text: &str| RustObject::parse(Path::new("/e/1/engine.rust"), text);
        let is_for = |object: &RustObject, version: &str| object.is_for(version.parse().unwrap());
        let all = parse(TEXT).unwrap();
        assert!(is_for(&all, "6.1") && is_for(&all, "7.3"));
        let some = parse(&format!("{TEXT}# versions: ..6.15\n")).unwrap();
        assert!(is_for(&some, "6.12") && !is_for(&some, "6.15"));
        assert!(parse(&format!("{TEXT}# versions: 6\n")).is_err());
    }

    #[test]
    fn an_option_that_breaks_it_is_refused_with_the_reason() {
        let object = RustObject::parse(Path::new("/e/1/engine.rust"), TEXT).unwrap();
        assert!(object.check("CONFIG_BAD=n\n# CONFIG_BAD is not set\n").is_ok());
        let error = object.check("CONFIG_A=y\nCONFIG_BAD=y\n").unwrap_err().to_string();
        assert!(error.contains("CONFIG_BAD, as it would break"), "{error}");
    }
}
