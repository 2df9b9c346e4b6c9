//! Lists the edits of the folder `linux`, so that the program has them where it has no sources.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("linux");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut list = "&[\n".to_owned();
    add(&folder, "", &mut list);
    list += "]\n";
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("edits.rs"), list).unwrap();
}

/// Adds each file of a folder: its path below the top, and its text.
fn add(top: &Path, below: &str, list: &mut String) {
    let entries = fs::read_dir(top.join(below)).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    for name in names {
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        let file = top.join(&path);
        if file.is_dir() {
            add(top, &path, list);
        } else {
            writeln!(list, "    ({path:?}, include_str!({file:?})),").unwrap();
        }
    }
}
