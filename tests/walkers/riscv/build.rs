//! Where the program lies in memory: its linker script, on the bare machine only.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo says where it builds");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none") {
        println!("cargo:rustc-link-arg-bins=-T{here}/link.ld");
    }
    println!("cargo:rerun-if-changed=link.ld");
}
