//! Linker flags for macOS, where the interpreter's symbols are resolved when the module loads.
//!
//! maturin sets these flags itself, but cargo alone does not.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("macos") {
        for argument in ["-undefined", "dynamic_lookup"] {
            println!("cargo::rustc-link-arg-cdylib={argument}");
        }
    }
}
