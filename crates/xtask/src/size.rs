//! `cargo xtask size`: bytes of the engine's text for a user without an operating system, and bytes
//! of its stack, by operation.
//!
//! The bytes of an operation are those of all functions that it can reach, which a user of that
//! operation alone gets. Operations share functions, so their sum is more than the whole. The stack
//! of an operation is that of its deepest path of calls, by the frame sizes that the compiler
//! writes to the object files. Not counted are the platform, which the user writes, panics, and
//! functions like `memcpy`. A function that calls itself counts once.

use crate::workspace::Outcome;
use crate::{setup, target, workspace};
use anyhow::{Context, bail, ensure};
use object::read::archive::ArchiveFile;
use object::{
    Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, SectionKind,
    SymbolIndex, elf,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use std::path::PathBuf;

const TRIPLE: &str = setup::BARE;
const FORMATS: [(&str, &str); 5] = [
    ("arm64", "arm64 stage 2, 4K granule"),
    ("ept", "Intel EPT"),
    ("npt", "AMD NPT"),
    ("power", "Power radix, 64K pages"),
    ("riscv", "RISC-V G-stage"),
];
const LEVELS: [&str; 2] = ["2", "s"];

/// Bytes of stack that any operation may use at `-O2`: a hypervisor's stack has a few KiB. All but
/// an unmap that takes out a contiguous group on Arm need at most 1,024.
const MOST_STACK: u64 = 1040;

/// The same for an owner's unmap, which keeps 16 runs of leaves until they are invalidated.
const MOST_STACK_OF_RUNS: u64 = 1472;

/// Most bytes of text for Arm's 4K granule: a map, unmap, protect and query of an `AddressSpace`
/// at `-Os`, and the functions of [`OF_C`] at `-Oz` with fat LTO.
const MOST_TEXT: [u64; 2] = [16 << 10, 100_000];

/// What a hypervisor calls that maps, protects, unmaps and looks up.
const OF_C: [&str; 12] = [
    "arm64_format",
    "arm64_break_before_make",
    "arm64_registers",
    "arm64_tlbi",
    "arm64_tlbi_local",
    "create",
    "destroy",
    "map",
    "protect",
    "query",
    "unmap",
    "write_protect",
];

/// The package that has each operation as a function.
pub const PROGRAMS: &str = "slat-programs";

/// Bytes of each operation, and of all.
type Sizes = (BTreeMap<String, u64>, u64);

/// Builds for each format and level of optimisation, and prints a table of text, or of `stack`.
pub fn run(stack: bool) -> anyhow::Result<()> {
    setup::target(setup::BARE)?;
    if stack {
        stacks()?;
        return Ok(());
    }
    let mut columns = Vec::new();
    for (feature, name) in FORMATS {
        for level in LEVELS {
            columns.push((format!("{name}, -O{level}"), Code::build(feature, level)?.sizes()?));
        }
    }
    print(&columns, "text");
    Ok(())
}

/// Builds for each format, and prints the table of stack.
fn stacks() -> anyhow::Result<Vec<(String, Sizes)>> {
    let mut columns = Vec::new();
    for (feature, name) in FORMATS {
        columns.push((name.to_owned(), Code::build(feature, "2")?.stacks()?));
    }
    print(&columns, "stack at -O2");
    Ok(columns)
}

/// Checks that no operation uses more stack than a hypervisor has, on any format, and the text of
/// small users.
pub fn check() -> anyhow::Result<Outcome> {
    for (name, (operations, _)) in &stacks()? {
        for (operation, bytes) in operations {
            let most = if operation == "space_unmap" { MOST_STACK_OF_RUNS } else { MOST_STACK };
            ensure!(
                *bytes <= most,
                "{operation} takes {bytes} bytes of stack on {name}, more than {most}"
            );
        }
    }
    let mut space = Code::build("arm64", "s")?;
    space.operations.retain(|name, _| name.starts_with("space_"));
    let lto = [("CARGO_PROFILE_RELEASE_LTO", "fat")];
    let archive = archive(TRIPLE, "slat-capi", "arm64-4k,panic-handler", "z", &lto)?;
    let mut c = Code::read(archive, "slat_")?;
    c.operations.retain(|name, _| OF_C.contains(&name.as_str()));
    ensure!(c.operations.len() == OF_C.len(), "of {OF_C:?} there are {:?}", c.operations);
    for ((what, code), most) in [("Rust", space), ("C", c)].into_iter().zip(MOST_TEXT) {
        let bytes = code.sizes()?.1;
        println!("a user in {what}: {bytes} bytes of text");
        ensure!(bytes <= most, "a user in {what} gets {bytes} bytes of text, more than {most}");
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// How a function reaches another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Reach {
    /// It calls the other, or takes its address: its frame stays meanwhile.
    Within,
    /// It jumps to the other, as a tail call.
    Instead,
}

/// A function, or data that a function refers to: each has its own section.
struct Part {
    name: String,
    bytes: u64,
    text: bool,
    /// Bytes of its frame, if the compiler reports them.
    frame: Option<u64>,
    reaches: HashSet<(usize, Reach)>,
}

/// Builds the engine's operations, or the library for C, optimised, and returns the path of the
/// archive.
pub fn archive(
    triple: &str,
    package: &str,
    feature: &str,
    level: &str,
    variables: &[(&str, &str)],
) -> anyhow::Result<PathBuf> {
    let folder = target().join("size");
    let mut build = workspace::cargo(&["rustc", "--quiet", "--release", "--package", package]);
    build.args(["--lib", "--crate-type", "staticlib", "--target", triple]);
    build.args(["--no-default-features", "--features", feature]);
    build
        .env("CARGO_TARGET_DIR", &folder)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", level)
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    workspace::ran(build.envs(variables.iter().copied()))?;
    let name = if package == PROGRAMS { "slat_size" } else { "slat_capi" };
    Ok(folder.join(triple).join(format!("release/lib{name}.a")))
}

/// Returns the object files of the engine and of its user in an archive.
pub fn own_files(data: &[u8]) -> anyhow::Result<Vec<object::File<'_>>> {
    let mut files = Vec::new();
    for member in ArchiveFile::parse(data)?.members() {
        let member = member?;
        let name = member.name();
        let own: [&[u8]; 3] = [b"slat-", b"slat_size-", b"slat_capi-"];
        if own.iter().any(|own| name.starts_with(own)) {
            files.push(object::File::parse(member.data(data)?)?);
        }
    }
    Ok(files)
}

/// Compiled code of the engine and of `slat-programs`.
struct Code {
    parts: Vec<Part>,
    /// The part in which each operation begins.
    operations: BTreeMap<String, usize>,
}

impl Code {
    fn build(feature: &str, level: &str) -> anyhow::Result<Self> {
        // The option for frame sizes is unstable; it does not change the code.
        let flags = [("RUSTC_BOOTSTRAP", "1"), ("RUSTFLAGS", "-Z emit-stack-sizes")];
        Self::read(archive(TRIPLE, PROGRAMS, feature, level, &flags)?, "op_")
    }

    /// Reads an archive whose operations have names that begin with `prefix`.
    fn read(path: PathBuf, prefix: &str) -> anyhow::Result<Self> {
        let data =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let files = own_files(&data)?;
        let mut code = Self { parts: Vec::new(), operations: BTreeMap::new() };
        let mut places = HashMap::new();
        let mut global = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            for section in file.sections() {
                places.insert((number, section.index()), code.parts.len());
                code.parts.push(Part {
                    name: section.name()?.to_owned(),
                    bytes: section.size(),
                    text: section.kind() == SectionKind::Text,
                    frame: None,
                    reaches: HashSet::new(),
                });
            }
            for symbol in file.symbols() {
                let (Ok(name), Some(section)) = (symbol.name(), symbol.section_index()) else {
                    continue;
                };
                let Some(&place) = places.get(&(number, section)) else { continue };
                if symbol.is_global() {
                    global.insert(name.to_owned(), place);
                }
                if let Some(operation) = name.strip_prefix(prefix) {
                    code.operations.insert(operation.to_owned(), place);
                }
            }
        }
        ensure!(!code.operations.is_empty(), "{} holds no operation", path.display());
        for (number, file) in files.iter().enumerate() {
            let part_of = |symbol: SymbolIndex| -> Option<usize> {
                let symbol = file.symbol_by_index(symbol).ok()?;
                match symbol.section_index() {
                    Some(section) => places.get(&(number, section)).copied(),
                    None => global.get(symbol.name().ok()?).copied(),
                }
            };
            for section in file.sections() {
                let of_frames = section.name()? == ".stack_sizes";
                for (_, relocation) in section.relocations() {
                    let to = match relocation.target() {
                        RelocationTarget::Symbol(symbol) => part_of(symbol),
                        RelocationTarget::Section(it) => places.get(&(number, it)).copied(),
                        _ => None,
                    };
                    let Some(to) = to else { continue };
                    if of_frames {
                        code.parts[to].frame = Some(frame(section.data()?)?);
                        continue;
                    }
                    let reach = match relocation.flags() {
                        RelocationFlags::Elf { r_type: elf::R_AARCH64_JUMP26 } => Reach::Instead,
                        _ => Reach::Within,
                    };
                    let from = places[&(number, section.index())];
                    code.parts[from].reaches.insert((to, reach));
                }
            }
        }
        Ok(code)
    }

    fn sizes(&self) -> anyhow::Result<Sizes> {
        let bytes = |reached: &HashSet<usize>| -> u64 {
            reached
                .iter()
                .map(|part| &self.parts[*part])
                .filter(|it| it.text)
                .map(|it| it.bytes)
                .sum()
        };
        let mut all = HashSet::new();
        let mut operations = BTreeMap::new();
        for (name, from) in &self.operations {
            let reached = self.reach(*from);
            operations.insert(name.clone(), bytes(&reached));
            all.extend(reached);
        }
        Ok((operations, bytes(&all)))
    }

    /// Returns a part and all parts that it reaches.
    fn reach(&self, from: usize) -> HashSet<usize> {
        let mut reached = HashSet::from([from]);
        let mut waiting = vec![from];
        while let Some(part) = waiting.pop() {
            let next = self.parts[part].reaches.iter().map(|(to, _)| *to);
            waiting.extend(next.filter(|to| reached.insert(*to)).collect::<Vec<_>>());
        }
        reached
    }

    /// Returns the deepest stack of each operation, and of all; prints the path of operations that
    /// use more than is allowed.
    fn stacks(&self) -> anyhow::Result<Sizes> {
        let mut depths = HashMap::new();
        let mut operations = BTreeMap::new();
        for (name, from) in &self.operations {
            let depth = self.depth(*from, &mut depths, &mut Vec::new())?;
            if depth > MOST_STACK {
                eprintln!("{name} takes {depth} bytes of stack:\n{}", self.path(name, &depths));
            }
            operations.insert(name.clone(), depth);
        }
        let all = operations.values().copied().max().unwrap_or(0);
        Ok((operations, all))
    }

    fn depth(
        &self,
        part: usize,
        depths: &mut HashMap<usize, u64>,
        above: &mut Vec<usize>,
    ) -> anyhow::Result<u64> {
        let Part { name, text, frame, reaches, .. } = &self.parts[part];
        if let Some(depth) = depths.get(&part) {
            return Ok(*depth);
        }
        // Constants: code that is not the engine's calls the functions that they point to.
        if !text {
            return Ok(0);
        }
        if above.contains(&part) {
            bail!("{name} calls itself: its stack has no bound");
        }
        let frame = frame.with_context(|| format!("no frame size of {name}"))?;
        above.push(part);
        let mut depth = frame;
        for (to, reach) in reaches.iter().filter(|(to, _)| *to != part) {
            let below = self.depth(*to, depths, above)?;
            depth = depth.max(if *reach == Reach::Within { frame + below } else { below });
        }
        above.pop();
        depths.insert(part, depth);
        Ok(depth)
    }

    /// Returns the deepest path of an operation, one frame per line, once the depths are known.
    fn path(&self, operation: &str, depths: &HashMap<usize, u64>) -> String {
        let mut lines = String::new();
        let mut at = self.operations.get(operation).copied();
        while let Some(part) = at {
            let Part { name, frame, reaches, .. } = &self.parts[part];
            let (frame, depth) = (frame.unwrap_or(0), depths.get(&part).copied().unwrap_or(0));
            _ = writeln!(lines, "{frame:>7}  {}", name.trim_start_matches(".text."));
            let deepest = |(to, reach): &&(usize, Reach)| {
                let below = depths.get(to).copied().unwrap_or(0);
                *to != part && below + if *reach == Reach::Within { frame } else { 0 } == depth
            };
            at = reaches.iter().find(deepest).map(|(to, _)| *to).filter(|_| depth > frame);
        }
        lines
    }
}

/// Parses a function's address, which the linker fills in, and the bytes of its frame, in LEB128.
fn frame(entry: &[u8]) -> anyhow::Result<u64> {
    let digits = entry.get(8..).context("a frame size of fewer bytes than an address")?;
    let end = digits.iter().position(|byte| byte & 0x80 == 0).context("no end of a number")?;
    ensure!(digits.len() == end + 1 && end < 9, "more than one frame size in a section");
    Ok(digits.iter().rev().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f)))
}

fn print(columns: &[(String, Sizes)], what: &str) {
    let names: BTreeSet<_> = columns.iter().flat_map(|(_, sizes)| sizes.0.keys()).collect();
    println!("Bytes of {what} for {TRIPLE}:\n");
    let heads: Vec<_> = columns.iter().map(|(head, _)| head.as_str()).collect();
    println!("| operation | {} |", heads.join(" | "));
    println!("|---|{}", "---:|".repeat(columns.len()));
    for name in names {
        row(name, columns.iter().map(|(_, sizes)| sizes.0.get(name).copied().unwrap_or(0)));
    }
    row("**all of them**", columns.iter().map(|(_, sizes)| sizes.1));
}

fn row(name: &str, bytes: impl Iterator<Item = u64>) {
    println!("| {name} | {} |", bytes.map(|n| n.to_string()).collect::<Vec<_>>().join(" | "));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, frame: u64, reaches: &[(usize, Reach)]) -> Part {
        let reaches = reaches.iter().copied().collect();
        Part { name: name.to_owned(), bytes: 1, text: true, frame: Some(frame), reaches }
    }

    #[test]
    fn the_deepest_path_counts_and_a_tail_call_replaces_its_caller() {
        use Reach::{Instead, Within};
        let code = Code {
            parts: vec![
                part("a", 16, &[(1, Within), (2, Instead)]),
                part("b", 32, &[(3, Within)]),
                part("c", 100, &[(0, Instead)]),
                part("d", 64, &[]),
            ],
            operations: BTreeMap::from([("b".to_owned(), 1), ("d".to_owned(), 3)]),
        };
        assert_eq!(
            code.stacks().unwrap(),
            (BTreeMap::from([("b".into(), 96), ("d".into(), 64)]), 96)
        );
        assert_eq!(code.sizes().unwrap().1, 2);
        let circle = code.depth(0, &mut HashMap::new(), &mut Vec::new()).unwrap_err();
        assert!(circle.to_string().contains("calls itself"), "{circle}");
    }

    #[test]
    fn a_frame_size_is_read_behind_an_address() {
        assert_eq!(frame(&[0, 0, 0, 0, 0, 0, 0, 0, 0xb0, 0x2b]).unwrap(), 5552);
        assert!(frame(&[0, 0, 0, 0, 0, 0, 0, 0, 0xb0]).is_err());
        assert!(frame(&[0, 0, 0]).is_err());
    }
}
