//! Doctests of the Rust blocks in README, the book and `docs/dev`.
//!
//! Run them with `cargo test --doc -p candle-gpt2-book`. `pages!` lists each page once and includes it as the
//! documentation of a private module. A test names the pages that are missing.

/// Includes each page as the documentation of a module, and lists the pages.
macro_rules! pages {
    ($($name:ident: $path:literal,)*) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!($path)]
            mod $name {}
        )*

        #[cfg(test)]
        const PAGES: &[&str] = &[$($path),*];
    };
}

pages! {
    readme: "../README.md",
    introduction: "src/introduction.md",
    tokens: "src/learn/tokens.md",
    embeddings: "src/learn/embeddings.md",
    dot_product: "src/learn/dot-product.md",
    attention_weights: "src/learn/attention-weights.md",
    queries_keys_values: "src/learn/queries-keys-values.md",
    causal_mask: "src/learn/causal-mask.md",
    multi_head: "src/learn/multi-head.md",
    encoder_decoder: "src/learn/encoder-decoder.md",
    cache: "src/learn/cache.md",
    block: "src/learn/block.md",
    gpt2: "src/learn/gpt2.md",
    sampling: "src/learn/sampling.md",
    learning: "src/learn/learning.md",
    questions: "src/learn/questions.md",
    code_tour: "src/learn/code-tour.md",
    references: "src/learn/references.md",
    faq: "src/faq.md",
    run: "src/guides/run.md",
    load: "src/guides/load.md",
    generate: "src/guides/generate.md",
    serve: "src/guides/serve.md",
    evaluate: "src/guides/evaluate.md",
    library: "src/guides/library.md",
    candle: "src/guides/candle.md",
    train: "src/guides/train.md",
    fine_tune: "src/guides/fine-tune.md",
    look: "src/guides/look.md",
    circuits: "src/guides/circuits.md",
    graphs: "src/guides/graphs.md",
    dictionaries: "src/guides/dictionaries.md",
    compress: "src/guides/compress.md",
    python: "src/guides/python.md",
    transformer_lens: "src/guides/transformer-lens.md",
    notebook_ioi: "src/notebooks/ioi.md",
    notebook_induction: "src/notebooks/induction.md",
    notebook_features: "src/notebooks/features.md",
    notebook_steering: "src/notebooks/steering.md",
    notebook_transcoders: "src/notebooks/transcoders.md",
    notebook_circuit: "src/notebooks/circuit.md",
    notebook_feature_circuit: "src/notebooks/feature-circuit.md",
    scale: "src/guides/scale.md",
    browser: "src/guides/browser.md",
    gpu: "src/guides/gpu.md",
    mistakes: "src/guides/mistakes.md",
    glossary: "src/reference/glossary.md",
    hook_points: "src/reference/hook-points.md",
    exactness: "src/reference/exactness.md",
    arithmetic: "src/reference/arithmetic.md",
    precisions: "src/reference/precisions.md",
    speed: "src/reference/speed.md",
    options: "src/reference/options.md",
    formats: "src/reference/formats.md",
    protocols: "src/reference/protocols.md",
    dev: "dev/README.md",
    dev_compression: "dev/compression.md",
    dev_exactness: "dev/exactness.md",
    dev_gpu: "dev/gpu.md",
    dev_looking_inside: "dev/looking-inside.md",
    speed_log: "dev/speed.md",
    platforms: "dev/platforms.md",
    architecture: "dev/architecture.md",
    add_a_format: "dev/add-a-format.md",
    add_an_instruction_set: "dev/add-an-instruction-set.md",
    add_a_protocol: "dev/add-a-protocol.md",
    add_a_sampler: "dev/add-a-sampler.md",
    add_a_site: "dev/add-a-site.md",
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::PAGES;

    /// Table of contents for mdBook.
    const CONTENTS: &str = "src/SUMMARY.md";

    #[test]
    fn every_page_is_listed() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut folders = vec![book.join("src"), book.join("dev")];
        let mut missing = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(book).unwrap().to_str().unwrap().replace('\\', "/");
                if path.is_dir() {
                    folders.push(path);
                } else if name.ends_with(".md") && name != CONTENTS && !PAGES.contains(&&*name) {
                    missing.push(name);
                }
            }
        }
        missing.sort();
        assert!(missing.is_empty(), "add to `pages!` in docs/lib.rs: {missing:?}");
    }
}
