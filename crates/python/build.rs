//! On macOS a module may leave to the interpreter what only that has; maturin asks for this by itself, and cargo alone does not.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("macos") {
        for argument in ["-undefined", "dynamic_lookup"] {
            println!("cargo::rustc-link-arg-cdylib={argument}");
        }
    }
}
