//! The Rust blocks of the book and of the README, as doctests: `cargo test --doc -p candle-gpt2-book`.
//!
//! A page is listed in `pages!` once. Each becomes the documentation of a private module, which exists for doctests only; a test
//! says which page of the book is missing there.

/// Makes each page the documentation of a module, and lists the pages.
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
    run: "src/guides/run.md",
    load: "src/guides/load.md",
    generate: "src/guides/generate.md",
    serve: "src/guides/serve.md",
    deploy: "src/guides/deploy.md",
    evaluate: "src/guides/evaluate.md",
    library: "src/guides/library.md",
    candle: "src/guides/candle.md",
    train: "src/guides/train.md",
    fine_tune: "src/guides/fine-tune.md",
    look: "src/guides/look.md",
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
    ray: "src/guides/ray.md",
    distributed: "src/guides/distributed.md",
    browser: "src/guides/browser.md",
    gpu: "src/guides/gpu.md",
    mistakes: "src/guides/mistakes.md",
    glossary: "src/reference/glossary.md",
    exactness: "src/reference/exactness.md",
    arithmetic: "src/reference/arithmetic.md",
    precisions: "src/reference/precisions.md",
    speed: "src/reference/speed.md",
    generation_options: "src/reference/generation-options.md",
    options: "src/reference/options.md",
    formats: "src/reference/formats.md",
    protocols: "src/reference/protocols.md",
    platforms: "src/reference/platforms.md",
    architecture: "src/reference/architecture.md",
    add_a_format: "src/reference/add-a-format.md",
    add_an_instruction_set: "src/reference/add-an-instruction-set.md",
    add_a_protocol: "src/reference/add-a-protocol.md",
    add_a_sampler: "src/reference/add-a-sampler.md",
    add_a_site: "src/reference/add-a-site.md",
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::PAGES;

    /// mdBook's table of contents, which holds no text.
    const CONTENTS: &str = "src/SUMMARY.md";

    #[test]
    fn every_page_of_the_book_is_listed() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut folders = vec![book.join("src")];
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
