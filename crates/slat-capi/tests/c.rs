//! The example in C, against the static library, as its users build it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command, and fails with what it printed; `None` if there is no such program.
fn run(command: &mut Command) -> Option<String> {
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => panic!("{command:?}: {error}"),
    };
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{printed}{errors}", output.status);
    Some(printed)
}

/// The static library, built as this test was.
fn library() -> PathBuf {
    // `target/debug/deps/c-...`: two folders up is where libraries are put.
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(Path::parent).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--package", "slat-capi", "--lib", "--target-dir"]);
    build.arg(folder.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
    // What the calling cargo has set is about this package as it tests it.
    run(build.env_remove("CARGO_MANIFEST_DIR")).expect("cargo, which runs this, is there");
    folder.join("libslat_capi.a")
}

fn build_and_run(compiler: &str, flags: &[&str], name: &str) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut build = Command::new(compiler);
    build.args(flags).args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]);
    build.arg("-I").arg(root.join("include")).arg(root.join("examples/golden.c"));
    // By `none`, the language of what follows is that of its name again.
    build.args(["-x", "none"]).arg(library()).arg("-ldl").arg("-o").arg(&program);
    run(&mut build)?;
    run(&mut Command::new(&program))
}

const RIGHT: &str = "all entries are those of the manuals\n";

#[test]
fn a_hypervisor_in_c_finds_the_entries_of_the_manuals() {
    let printed = build_and_run("cc", &["-std=c11", "-x", "c"], "golden");
    let printed = printed.expect("no C compiler is called `cc`: install gcc and libc6-dev");
    assert_eq!(printed, RIGHT);
}

#[test]
fn the_header_is_one_of_cpp_too() {
    match build_and_run("g++", &["-std=c++17", "-x", "c++"], "golden-cpp") {
        Some(printed) => assert_eq!(printed, RIGHT),
        None => println!("left out: no C++ compiler is called `g++`"),
    }
}

#[test]
fn an_obligation_that_is_dropped_is_a_warning() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dropped.c");
    let program = "#include <slat.h>\n\
                   void f(struct slat_space *s) { slat_write_protect(s, 0, 4096); }\n";
    std::fs::write(&source, program).unwrap();
    let mut check = Command::new("cc");
    // Not `-fsyntax-only`, with which GCC does not look.
    check.args(["-std=c11", "-c", "-Werror", "-I"]).arg(root.join("include"));
    check.arg("-o").arg(source.with_extension("o"));
    let output = check.arg(&source).output().expect("no C compiler is called `cc`");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("unused"), "{errors}");
}
