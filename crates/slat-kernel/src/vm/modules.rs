//! Modules of a kernel, from its `/lib/modules/VERSION`: their dependencies and load order,
//! unpacked.
//!
//! Only an installed kernel has `modules.dep`, so the dependencies of a module are read from the
//! module itself (`.modinfo`, as `modinfo` shows it).

use anyhow::{Context, anyhow, bail};
use object::{Object, ObjectSection};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A module, ready to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Name of the module, with `_`.
    pub name: String,
    /// The uncompressed module.
    pub image: Vec<u8>,
    /// Names and values of its parameters.
    pub params: Vec<(String, String)>,
}

/// The modules of one kernel.
#[derive(Debug)]
pub struct Tree {
    files: BTreeMap<String, PathBuf>,
    built_in: Vec<String>,
}

impl Tree {
    /// Finds the modules in a directory and its subdirectories.
    ///
    /// # Errors
    /// The directory has no module, or it cannot be read.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(next) = folders.pop() {
            let entries = fs::read_dir(&next);
            let entries = entries.map_err(|error| anyhow!("{}: {error}", next.display()))?;
            for entry in entries.flatten() {
                // Symbolic links are skipped: they lead to the kernel's source and build trees.
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                    Ok(kind) if kind.is_file() => {
                        if let Some(name) = module_name(&entry.path()) {
                            files.insert(name, entry.path());
                        }
                    }
                    _ => {}
                }
            }
        }
        if files.is_empty() {
            bail!(
                "{}: there is no module in it; give the /lib/modules/VERSION of the kernel",
                folder.display()
            );
        }
        let list = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
        let built_in = list.lines().filter_map(|line| module_name(Path::new(line))).collect();
        Ok(Self { files, built_in })
    }

    /// Returns a module and its dependencies, each after its own dependencies. Built-in modules are
    /// left out.
    ///
    /// # Errors
    /// A module is missing or cannot be read.
    pub fn load(&self, name: &str) -> anyhow::Result<Vec<Module>> {
        let mut loaded = Vec::new();
        self.load_into(name, &mut loaded, &mut Vec::new())?;
        Ok(loaded)
    }

    fn load_into(
        &self,
        name: &str,
        loaded: &mut Vec<Module>,
        waiting: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let known = loaded.iter().any(|module| module.name == name);
        if known || waiting.iter().any(|other| other == name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            if self.built_in.iter().any(|other| other == name) {
                return Ok(());
            }
            bail!("the kernel has no module {name}: it is neither among its modules nor built in");
        };
        let image = unpack(path)?;
        let needs = needs(&image)
            .with_context(|| format!("{} is no module of a kernel", path.display()))?;
        waiting.push(name.to_owned());
        for other in &needs {
            self.load_into(other, loaded, waiting)?;
        }
        loaded.push(Module { name: name.to_owned(), image, params: Vec::new() });
        Ok(())
    }
}

/// A parameter of a module, as on the kernel's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleParam {
    /// Name of the module, with `_`.
    pub module: String,
    /// Name of the parameter.
    pub name: String,
    /// Value of the parameter.
    pub value: String,
}

impl FromStr for ModuleParam {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || {
            let (module, rest) = text.split_once('.')?;
            let (name, value) = rest.split_once('=')?;
            let word = |text: &str| {
                let inside = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
                !text.is_empty() && text.chars().all(inside)
            };
            let clean = !value.chars().any(|c| c.is_whitespace() || c.is_control() || c == '"');
            (word(module) && word(name) && clean).then(|| Self {
                module: module.replace('-', "_"),
                name: name.to_owned(),
                value: value.to_owned(),
            })
        };
        parts()
            .ok_or_else(|| "write it as MODULE.NAME=VALUE, such as kvm.nx_huge_pages=1".to_owned())
    }
}

/// Adds each parameter to its module. Returns the parameters of modules that are not loaded, as
/// words for the kernel's command line, which is where built-in code reads them.
pub fn give(params: &[ModuleParam], modules: &mut [Module]) -> Vec<String> {
    let mut words = Vec::new();
    for ModuleParam { module, name, value } in params {
        match modules.iter_mut().find(|known| known.name == *module) {
            Some(module) => module.params.push((name.clone(), value.clone())),
            None => words.push(format!("{module}.{name}={value}")),
        }
    }
    words
}

/// Returns the module's name: `kvm_amd` for `.../kvm-amd.ko.xz`.
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let (stem, rest) = name.split_once(".ko")?;
    (rest.is_empty() || rest.starts_with('.')).then(|| stem.replace('-', "_"))
}

fn unpack(path: &Path) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    let packed = fs::read(path).with_context(|| format!("cannot read {name}"))?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("ko") => Ok(packed),
        Some("xz") => {
            let mut image = Vec::new();
            let mut reader = lzma_rust2::XzReader::new(&packed[..], true);
            reader.read_to_end(&mut image).with_context(|| format!("cannot unpack {name}"))?;
            Ok(image)
        }
        _ => bail!("{name}: modules may be plain or packed by xz; unpack it first"),
    }
}

/// Returns the names of the modules on which a module depends.
fn needs(image: &[u8]) -> anyhow::Result<Vec<String>> {
    let file = object::File::parse(image)?;
    let section = file.section_by_name(".modinfo").context("it has no .modinfo")?;
    Ok(depends(section.data()?))
}

fn depends(modinfo: &[u8]) -> Vec<String> {
    let fields = modinfo.split(|byte| *byte == 0);
    let list = fields.filter_map(|field| field.strip_prefix(b"depends="));
    let names = list.flat_map(|list| list.split(|byte| *byte == b','));
    let names = names.filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8_lossy(name).replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an ELF file that has only a `.modinfo`.
    fn module(needs: &str) -> Vec<u8> {
        let modinfo = format!("license=GPL\0depends={needs}\0name=x\0");
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        let body = 64 + modinfo.len() + names.len();
        bytes.extend(1u16.to_le_bytes()); // ET_REL
        bytes.extend(62u16.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend((body as u64).to_le_bytes()); // section headers
        bytes.extend(0u32.to_le_bytes());
        for half in [64u16, 0, 0, 64, 3, 2] {
            bytes.extend(half.to_le_bytes());
        }
        bytes.extend(modinfo.bytes());
        bytes.extend(names);
        let mut section = |name: u32, kind: u32, offset: usize, size: usize| {
            bytes.extend(name.to_le_bytes());
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 16]);
            bytes.extend((offset as u64).to_le_bytes());
            bytes.extend((size as u64).to_le_bytes());
            bytes.extend([0; 24]);
        };
        section(0, 0, 0, 0);
        section(1, 1, 64, modinfo.len());
        section(10, 3, 64 + modinfo.len(), names.len());
        bytes
    }

    fn tree(modules: &[(&str, &str)]) -> (tempfile::TempDir, anyhow::Result<Tree>) {
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("kernel/arch");
        fs::create_dir_all(&kernel).unwrap();
        for (name, needs) in modules {
            fs::write(kernel.join(name), module(needs)).unwrap();
        }
        fs::write(folder.path().join("modules.builtin"), "kernel/lib/crc-32.ko\n").unwrap();
        let tree = Tree::read(folder.path());
        (folder, tree)
    }

    fn names(modules: &[Module]) -> Vec<&str> {
        modules.iter().map(|module| &*module.name).collect()
    }

    #[test]
    fn a_module_comes_after_all_that_it_needs() {
        let (_folder, tree) = tree(&[
            ("kvm-amd.ko", "kvm,ccp"),
            ("kvm.ko", "irqbypass,crc_32"),
            ("irqbypass.ko", ""),
            ("ccp.ko", "irqbypass"),
            ("other.ko", ""),
        ]);
        let loaded = tree.unwrap().load("kvm_amd").unwrap();
        assert_eq!(names(&loaded), ["irqbypass", "kvm", "ccp", "kvm_amd"]);
    }

    #[test]
    fn modules_that_need_each_other_are_loaded_once() {
        let (_folder, tree) = tree(&[("a.ko", "b"), ("b.ko", "a")]);
        assert_eq!(names(&tree.unwrap().load("a").unwrap()), ["b", "a"]);
    }

    #[test]
    fn what_is_built_in_is_not_loaded_and_what_is_missing_is_named() {
        let (_folder, tree) = tree(&[("kvm.ko", "irqbypass")]);
        let tree = tree.unwrap();
        assert_eq!(tree.load("crc_32").unwrap(), []);
        let error = tree.load("kvm").unwrap_err().to_string();
        assert!(error.contains("no module irqbypass"), "{error}");
    }

    #[test]
    fn a_folder_without_modules_is_refused() {
        let (_folder, tree) = tree(&[]);
        assert!(tree.unwrap_err().to_string().contains("/lib/modules/VERSION"));
    }

    #[test]
    fn a_module_that_is_packed_otherwise_or_no_module_is_refused() {
        let (folder, tree) = tree(&[("a.ko", ""), ("b.ko.zst", ""), ("c.ko", "")]);
        fs::write(folder.path().join("kernel/arch/c.ko"), "text").unwrap();
        let tree = tree.unwrap();
        assert!(tree.load("b").unwrap_err().to_string().contains("unpack it first"));
        assert!(format!("{:#}", tree.load("c").unwrap_err()).contains("no module of a kernel"));
    }

    #[test]
    fn a_module_parameter_has_three_parts() {
        let param: ModuleParam = "kvm-amd.npt=0".parse().unwrap();
        let parts = (&*param.module, &*param.name, &*param.value);
        assert_eq!(parts, ("kvm_amd", "npt", "0"));
        for wrong in ["kvm", "kvm.npt", "npt=1", ".npt=1", "kvm.=1", "kvm.npt=1 2", "kvm.a b=1"] {
            assert!(wrong.parse::<ModuleParam>().unwrap_err().contains("MODULE.NAME"), "{wrong}");
        }
    }

    #[test]
    fn parameters_of_built_in_code_go_to_the_command_line() {
        let param = |text: &str| text.parse::<ModuleParam>().unwrap();
        let params = [param("kvm.nx_huge_pages=1"), param("kvm-arm.mode=nvhe")];
        let mut modules =
            [Module { name: "kvm".to_owned(), image: Vec::new(), params: Vec::new() }];
        assert_eq!(give(&params, &mut modules), ["kvm_arm.mode=nvhe"]);
        assert_eq!(modules[0].params, [("nx_huge_pages".to_owned(), "1".to_owned())]);
    }
}
