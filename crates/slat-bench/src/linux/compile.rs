//! Compilation of a tree to a program.

use crate::linux::{Error, Tree};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

macro_rules! ours {
    ($($file:literal),* $(,)?) => { [$(($file, include_str!(concat!("../../helper/", $file)))),*] };
}

/// The files of the stub kernel, and of the driver.
const OURS: [(&str, &str); 13] = ours!(
    "walks.c",
    "callers.c",
    "callers.h",
    "machine.c",
    "machine.h",
    "driver.c",
    "shim/kernel.h",
    "shim/linux/bitfield.h",
    "shim/linux/bits.h",
    "shim/linux/kvm_host.h",
    "shim/linux/pgtable.h",
    "shim/linux/rbtree.h",
    "shim/linux/types.h",
);

/// Each is compiled separately, as in the kernel: nothing is inlined across them.
const UNITS: [&str; 4] = ["walks.c", "callers.c", "machine.c", "driver.c"];

/// The flags of Linux that matter here.
const FLAGS: [&str; 9] = [
    "-O2",
    "-std=gnu11",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-delete-null-pointer-checks",
    "-fno-stack-protector",
    "-fno-strict-overflow",
    "-fno-pie",
    "-w",
];

/// The variant of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Build {
    /// Log2 of the granule: 12, 14 or 16.
    pub page_shift: u32,
    /// Bits of guest physical addresses.
    pub address_bits: u32,
    /// Whether stage 2 forces the memory type (FEAT_S2FWB).
    pub fwb: bool,
    /// Whether walks of live tables count as shared with others.
    pub shared: bool,
    /// Whether it counts operations; the times of such a program mean nothing.
    pub count: bool,
}

/// `CC`, with its arguments.
#[derive(Debug)]
struct Compiler {
    program: String,
    arguments: Vec<String>,
}

impl Compiler {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

/// A folder in which programs are built; it is removed when this is dropped.
#[derive(Debug)]
pub struct Workshop {
    folder: TempDir,
    compiler: Compiler,
    /// The compiler's own description of its version.
    version: String,
    built: HashMap<(u64, Build), PathBuf>,
}

impl Workshop {
    /// Makes a new folder with the files of the stub kernel. The compiler is `CC`, or `cc`.
    ///
    /// # Errors
    /// [`Error::NoCompiler`], or the folder cannot be made.
    pub fn new() -> Result<Self, Error> {
        let words = std::env::var("CC").unwrap_or_default();
        let mut words = words.split_whitespace().map(str::to_owned);
        let compiler = Compiler {
            program: words.next().unwrap_or_else(|| "cc".to_owned()),
            arguments: words.collect(),
        };
        let output = compiler.command().arg("--version").output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            return Err(Error::NoCompiler(compiler.program));
        };
        let said = String::from_utf8_lossy(&output.stdout);
        let version = said.lines().next().unwrap_or_default().to_owned();
        let folder = tempfile::Builder::new().prefix("slat-linux-").tempdir();
        let folder = folder.map_err(Error::io("cannot make a folder to build in"))?;
        for (file, text) in OURS {
            write(&folder.path().join("ours").join(file), text)?;
        }
        Ok(Self { folder, compiler, version, built: HashMap::new() })
    }

    /// Returns the compiler's own description of its version.
    pub fn compiler(&self) -> &str {
        &self.version
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the program of a tree, which is built once.
    ///
    /// # Errors
    /// [`Error::DoesNotCompile`], with the compiler's messages.
    pub fn build(&mut self, tree: &Tree, how: Build) -> Result<PathBuf, Error> {
        let key = (tree.id, how);
        if let Some(program) = self.built.get(&key) {
            return Ok(program.clone());
        }
        let folder = self.folder.path().join(self.built.len().to_string());
        write(&folder.join("pgtable.c"), &tree.pgtable)?;
        write(&folder.join("cut.c"), &tree.cut)?;
        for (header, text) in &tree.headers {
            write(&folder.join("asm").join(header), text)?;
        }
        let objects: Vec<PathBuf> =
            UNITS.iter().map(|unit| folder.join(unit).with_extension("o")).collect();
        for (unit, object) in UNITS.iter().zip(&objects) {
            let mut command = self.command(tree, how, &folder);
            command.arg("-c").arg(self.ours().join(unit)).arg("-o").arg(object);
            self.run(tree, unit, &mut command)?;
        }
        let program = folder.join("helper");
        let mut link = self.compiler.command();
        link.arg("-no-pie").args(&objects).arg("-o").arg(&program);
        self.run(tree, "helper", &mut link)?;
        self.built.insert(key, program.clone());
        Ok(program)
    }

    fn ours(&self) -> PathBuf {
        self.folder.path().join("ours")
    }

    fn command(&self, tree: &Tree, how: Build, folder: &Path) -> Command {
        let mut command = self.compiler.command();
        command.args(FLAGS).args(&tree.defines);
        // Turns off an option that distributions add, and Linux does not.
        if cfg!(target_arch = "x86_64") {
            command.arg("-fcf-protection=none");
        }
        command.arg(format!("-DPAGE_SHIFT={}", how.page_shift));
        command.arg(format!("-DSLAT_IPA_BITS={}", how.address_bits));
        command.arg(format!("-DSLAT_FWB={}", u8::from(how.fwb)));
        command.arg(format!("-DSLAT_SHARED={}", u8::from(how.shared)));
        if how.count {
            command.arg("-DSLAT_COUNT");
        }
        // The stub kernel's headers come first: the tree's headers include the kernel's by the same
        // names.
        command.arg("-I").arg(self.ours().join("shim")).arg("-I").arg(folder);
        command
    }

    fn run(&self, tree: &Tree, file: &str, command: &mut Command) -> Result<(), Error> {
        let output = command.output().map_err(Error::io(self.compiler.program.clone()))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let folder = self.folder.path().display().to_string();
        let messages = said.lines().filter(|line| line.contains("error")).take(5);
        let messages: Vec<String> = messages.map(|line| line.replace(&folder, "")).collect();
        let messages = if messages.is_empty() { said.into_owned() } else { messages.join("\n") };
        Err(Error::DoesNotCompile { tree: tree.name.clone(), file: file.to_owned(), messages })
    }
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io(format!("{}", folder.display())))?;
    }
    fs::write(path, text).map_err(Error::io(format!("{}", path.display())))
}
