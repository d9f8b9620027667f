//! Signatures of the kernels in `kernels.cu`: names, ordered parameters and threads per block.
//!
//! The compiler checks launches against these declarations. Tests check the declarations against the source,
//! the launches in this folder and the kernels' CPU test. With the feature `cuda`, they also check them
//! against the compiled kernels.

#![cfg_attr(
    feature = "cuda",
    expect(unsafe_code, reason = "kernels are launched with the arguments that their declarations require")
)]

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, WrapErr};

#[cfg(feature = "cuda")]
use super::launch::{Element, KERNELS, MODULE, Parameter, Read, Shared, Strides, Written};

/// Number of threads in a block that works on one row.
pub(super) const ROW_THREADS: u32 = 256;
/// Number of threads in a block that writes rows of one head.
pub(super) const HEAD_THREADS: u32 = 64;
/// Number of threads in a block that multiplies a few rows by a matrix.
pub(super) const PRODUCT_THREADS: u32 = 512;
/// Maximum number of threads that share a row of the weight in a few-row product.
pub(super) const MAX_LANES: u32 = 8;
/// Maximum number of rows in a few-row product in f32; other dtypes allow one row.
pub(super) const MAX_ROWS: u32 = 4;
/// Number of threads in a block that computes attention for one query.
pub(super) const ATTENTION_THREADS: u32 = 512;
/// Number of keys that a single-query block reads at once.
pub(super) const ATTENTION_KEYS: u32 = 64;
/// Maximum number of columns for each thread in the backward pass of a layer norm.
pub(super) const NORM_COLUMNS: u32 = 8;
/// Maximum number of blocks in a launch that splits each query's keys between blocks.
pub(super) const SPLIT_BLOCKS: u32 = 256;

/// Declaration of a kernel, for tests.
#[cfg(test)]
struct KernelDeclaration {
    /// Name of the struct with the parameters.
    structure: &'static str,
    names: &'static [&'static str],
    threads: (&'static str, u32),
    /// Names and types of the parameters.
    parameters: &'static [(&'static str, &'static str)],
}

/// Declares kernels.
///
/// Each declaration becomes a struct with the parameters. It lists the names of the kernels that take them,
/// without the suffix for the element type, and the threads per block.
macro_rules! kernels {
    ($(
        $(#[$doc:meta])*
        $kernel:ident [$($name:literal),*] $threads:ident {
            $($parameter:ident: $type:ty),* $(,)?
        }
    )*) => {
        $(
            $(#[$doc])*
            #[cfg(feature = "cuda")]
            pub(super) struct $kernel<'a, T> {
                $(pub(super) $parameter: $type),*
            }

            #[cfg(feature = "cuda")]
            impl<T: Element> $kernel<'_, T> {
                /// Launches the kernel `name` for this element type.
                ///
                /// Panics if another struct declares the name, because the parameters would not match.
                ///
                /// # Safety
                /// The parameters and the grid must meet the requirements in the kernel's source.
                pub(super) unsafe fn launch(
                    mut self,
                    device: &CudaDevice,
                    name: &str,
                    grid_dim: (u32, u32, u32),
                ) -> candle_core::Result<()> {
                    // Comparing up to three names is negligible next to the driver's lookup and launch.
                    assert!([$($name),*].contains(&name), "kernel `{name}` does not take these parameters");
                    let name = format!("{name}_{}", T::NAME);
                    let function = device.get_or_load_custom_func(&name, MODULE, KERNELS)?;
                    let mut launch = function.builder();
                    $(self.$parameter.push_to(&mut launch);)*
                    let config = LaunchConfig { grid_dim, block_dim: ($threads, 1, 1), shared_mem_bytes: 0 };
                    // SAFETY: the caller upholds the kernel's requirements, and the parameters match the
                    // kernel in number, order and type.
                    unsafe { launch.launch(config) }.w()?;
                    Ok(())
                }
            }
        )*

        #[cfg(test)]
        const DECLARATIONS: &[KernelDeclaration] = &[$(KernelDeclaration {
            structure: stringify!($kernel),
            names: &[$($name),*],
            threads: (stringify!($threads), $threads),
            parameters: &[$((stringify!($parameter), stringify!($type))),*],
        }),*];
    };
}

kernels! {
    /// Adds the bias to the f32 result of a matrix product and applies the epilogue.
    AddBias ["add_bias", "add_bias_gelu", "add_bias_residual"] ROW_THREADS {
        sums: Read<'a, f32>,
        bias: Read<'a, T>,
        residual: Option<Read<'a, T>>,
        y: Written<'a, T>,
        count: usize,
        width: u32,
    }

    /// Product of a few rows and a matrix, in f32.
    RowProduct ["row_product"] PRODUCT_THREADS {
        x: Read<'a, T>,
        weight: Read<'a, T>,
        y: Written<'a, f32>,
        rows: u32,
        inner: u32,
        columns: u32,
        lanes: u32,
    }

    /// Product of a few rows and a matrix, with bias and epilogue.
    FinishedRowProduct ["row_product_bias", "row_product_bias_gelu", "row_product_bias_residual"] PRODUCT_THREADS {
        x: Read<'a, T>,
        weight: Read<'a, T>,
        bias: Read<'a, T>,
        residual: Option<Read<'a, T>>,
        y: Written<'a, T>,
        rows: u32,
        inner: u32,
        columns: u32,
        lanes: u32,
    }

    /// Layer norm.
    LayerNorm ["layer_norm"] ROW_THREADS {
        x: Read<'a, T>,
        weight: Read<'a, T>,
        bias: Read<'a, T>,
        y: Written<'a, T>,
        width: u32,
        epsilon: f32,
    }

    /// Softmax over the visible keys.
    PrefixSoftmax ["prefix_softmax"] ROW_THREADS {
        scores: Read<'a, f32>,
        weights: Written<'a, T>,
        list: Option<Read<'a, u32>>,
        first: u32,
        heads: u32,
        queries: u32,
        keys: u32,
        rows: u32,
    }

    /// Writes new keys and values into the KV cache.
    WriteTokens ["write_tokens"] HEAD_THREADS {
        keys: Read<'a, T>,
        values: Read<'a, T>,
        key_memory: Shared<'a, T>,
        value_memory: Shared<'a, T>,
        key_strides: Strides,
        value_strides: Strides,
        list: Option<Read<'a, u32>>,
        first: u32,
        tokens: u32,
        capacity: u32,
        head_dim: u32,
    }

    /// Dropout.
    Drop ["drop"] ROW_THREADS {
        x: Read<'a, T>,
        y: Written<'a, T>,
        rows: usize,
        width: usize,
        tokens: u32,
        queries: u32,
        first_query: u32,
        first: u32,
        seed: usize,
        limit: usize,
        factor: f32,
    }

    /// One AdamW step, in place.
    AdamW ["adamw"] ROW_THREADS {
        parameter: Shared<'a, T>,
        mean: Shared<'a, T>,
        square: Shared<'a, T>,
        gradient: Read<'a, T>,
        count: usize,
        factor: f32,
        keep_mean: f32,
        add_mean: f32,
        keep_square: f32,
        add_square: f32,
        keep: f32,
        rate: f32,
        root_factor: f32,
        epsilon: f32,
    }

    /// Layer norm with f32 parameters.
    WideNorm ["wide_norm"] ROW_THREADS {
        x: Read<'a, T>,
        weight: Read<'a, f32>,
        bias: Read<'a, f32>,
        y: Written<'a, T>,
        width: u32,
        epsilon: f32,
    }

    /// Gradients of a layer norm.
    NormBackward ["norm_backward"] ROW_THREADS {
        x: Read<'a, T>,
        weight: Read<'a, f32>,
        gradient: Read<'a, T>,
        result: Written<'a, T>,
        sums: Written<'a, f32>,
        rows: u32,
        width: u32,
        epsilon: f32,
    }

    /// GELU.
    Gelu ["gelu"] ROW_THREADS {
        x: Read<'a, T>,
        y: Written<'a, T>,
        count: usize,
    }

    /// Gradient of GELU.
    GeluBackward ["gelu_backward"] ROW_THREADS {
        x: Read<'a, T>,
        gradient: Read<'a, T>,
        result: Written<'a, T>,
        count: usize,
    }

    /// Gradient of a softmax over the visible keys.
    SoftmaxBackward ["softmax_backward"] ROW_THREADS {
        weights: Read<'a, T>,
        gradient: Read<'a, f32>,
        result: Written<'a, T>,
        list: Option<Read<'a, u32>>,
        first: u32,
        heads: u32,
        queries: u32,
        keys: u32,
        rows: u32,
    }

    /// Loss of each row of logits, and the gradient of the logits.
    Losses ["losses"] ROW_THREADS {
        logits: Read<'a, f32>,
        targets: Read<'a, u32>,
        loss: Written<'a, f32>,
        gradient: Option<Written<'a, T>>,
        width: u32,
        distance: u32,
    }

    /// Sums of groups of rows, for the gradient of an embedding.
    AddRows ["add_rows"] ROW_THREADS {
        rows: Read<'a, T>,
        table_rows: Read<'a, u32>,
        starts: Read<'a, u32>,
        order: Read<'a, u32>,
        sums: Shared<'a, T>,
        width: u32,
    }

    /// Sum of squares over each block's elements.
    Squares ["squares"] ROW_THREADS {
        x: Read<'a, T>,
        sums: Written<'a, f32>,
        count: usize,
    }

    /// Attention for one query.
    Attend ["attend_64", "attend_128", "attend_256"] ATTENTION_THREADS {
        q: Read<'a, T>,
        k: Read<'a, T>,
        v: Read<'a, T>,
        context: Written<'a, T>,
        query_strides: Strides,
        key_strides: Strides,
        value_strides: Strides,
        list: Option<Read<'a, u32>>,
        first: u32,
        head_dim: u32,
        scale: f32,
    }

    /// Self-attention for a few new tokens.
    StepAttention ["step_attention_64", "step_attention_128", "step_attention_256"] ATTENTION_THREADS {
        sums: Read<'a, f32>,
        bias: Read<'a, T>,
        key_memory: Shared<'a, T>,
        value_memory: Shared<'a, T>,
        context: Written<'a, T>,
        positions: Read<'a, u32>,
        tokens: u32,
        capacity: u32,
        head_dim: u32,
        scale: f32,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::widths::WIDEST_SINGLE_QUERY;

    const SOURCE: &str = include_str!("kernels.cu");
    /// Test that runs the kernels on the CPU.
    const CPU_TEST: &str = include_str!("../../tests/cuda_on_cpu/main.cpp");
    /// Source files with launches.
    const ATTENTION: &str = include_str!("attention.rs");
    const NORM: &str = include_str!("mod.rs");
    const PRODUCTS: &str = include_str!("products.rs");
    const TRAINING: &str = include_str!("training.rs");
    /// Suffix of the kernel names for each element type, with its name in C++.
    const ELEMENTS: [(&str, &str); 3] = [("f32", "float"), ("f16", "__half"), ("bf16", "__nv_bfloat16")];

    /// Function-like macro in the kernel source.
    struct Macro<'a> {
        parameters: Vec<&'a str>,
        body: String,
    }

    fn is_word(letter: char) -> bool {
        letter.is_alphanumeric() || letter == '_'
    }

    /// Returns the first token of `text`: a word, or any other single character.
    fn first_token(text: &str) -> Option<&str> {
        let first = text.chars().next()?;
        let word = text.find(|letter| !is_word(letter)).unwrap_or(text.len());
        Some(&text[..word.max(if is_word(first) { 0 } else { first.len_utf8() })])
    }

    fn tokens(mut text: &str) -> impl Iterator<Item = &str> {
        std::iter::from_fn(move || {
            let token = first_token(text)?;
            text = &text[token.len()..];
            Some(token)
        })
    }

    /// Splits the parenthesized arguments at the start of `text` at commas; also returns the rest.
    fn arguments(text: &str) -> (Vec<&str>, &str) {
        let (mut depth, mut start, mut found) = (0, 1, Vec::new());
        for (at, letter) in text.char_indices() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            if depth == 0 || (depth == 1 && letter == ',') {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            if depth == 0 {
                return (found, &text[start..]);
            }
        }
        panic!("unclosed parenthesis: {}", &text[..text.len().min(80)]);
    }

    /// Returns C++ code without comments, with continued lines joined.
    fn logical_lines(source: &str) -> Vec<String> {
        let joined = source.replace("\\\n", " ");
        let code = |line: &str| line.split("//").next().unwrap_or_default().trim().to_owned();
        joined.lines().map(code).collect()
    }

    /// Returns C++ code without comments, with its macros expanded.
    fn expanded(source: &str) -> String {
        let lines = logical_lines(source);
        let (mut macros, mut text) = (BTreeMap::new(), String::new());
        for line in &lines {
            let Some(definition) = line.strip_prefix("#define ") else {
                text.extend(["\n", line.as_str()]);
                continue;
            };
            let (name, rest) = definition.split_at(definition.find('(').expect("a macro with parameters"));
            let (parameters, body) = arguments(rest);
            macros.insert(name, Macro { parameters, body: body.to_owned() });
        }
        expand_macros(&text, &macros)
    }

    fn expand_macros(text: &str, macros: &BTreeMap<&str, Macro<'_>>) -> String {
        let (mut result, mut rest) = (String::new(), text);
        while let Some(token) = first_token(rest) {
            let after = &rest[token.len()..];
            let Some(found) = macros.get(token).filter(|_| after.starts_with('(')) else {
                result.push_str(token);
                rest = after;
                continue;
            };
            let (values, after) = arguments(after);
            assert_eq!(values.len(), found.parameters.len(), "{token}");
            let replaced = |word| {
                let place = found.parameters.iter().position(|parameter| *parameter == word);
                place.map_or(word, |place| values[place])
            };
            let body: String = tokens(&found.body).map(replaced).collect();
            result.push_str(&expand_macros(&body.replace("##", ""), macros));
            rest = after;
        }
        result
    }

    /// Kernels by name: thread bound, and the names and types of the parameters.
    type Signatures = BTreeMap<String, (String, Vec<(String, String)>)>;

    fn source_signatures() -> Signatures {
        let text = expanded(SOURCE);
        let kernels = text.split("extern \"C\" __global__ void __launch_bounds__").skip(1).map(|text| {
            let (bound, rest) = arguments(text);
            let (name, rest) = rest.split_at(rest.find('(').expect("parameters"));
            let parameters = arguments(rest).0.into_iter().map(|parameter| {
                let start = parameter.rfind(|letter| !is_word(letter)).expect("a type and a name") + 1;
                let (c_type, name) = parameter.split_at(start);
                (name.to_owned(), c_type.split_whitespace().collect::<Vec<_>>().join(" "))
            });
            (name.trim().to_owned(), (bound[0].to_owned(), parameters.collect()))
        });
        kernels.collect()
    }

    /// Returns the C++ spelling of a declared parameter type.
    fn c_spelling(declared: &str, element: &str) -> String {
        let plain: String = declared.chars().filter(|letter| !letter.is_whitespace()).collect();
        let inner = |kind: &str, end: &str| {
            let name = plain.strip_prefix(kind)?.strip_suffix(end)?;
            Some(match name {
                "T" => element,
                "f32" => "float",
                "u32" => "unsigned",
                _ => panic!("{declared} has no counterpart"),
            })
        };
        let read = inner("Read<'a,", ">").or_else(|| inner("Option<Read<'a,", ">>"));
        let written = inner("Written<'a,", ">").or_else(|| inner("Shared<'a,", ">"));
        let written = written.or_else(|| inner("Option<Written<'a,", ">>"));
        match (read, written, plain.as_str()) {
            (Some(name), ..) => format!("const {name} *"),
            (_, Some(name), _) => format!("{name} *"),
            (.., "u32") => "unsigned".to_owned(),
            (.., "usize") => "size_t".to_owned(),
            (.., "f32") => "float".to_owned(),
            (.., "Strides") => plain,
            _ => panic!("{declared} has no counterpart"),
        }
    }

    /// Returns the text after `start`, up to `end`.
    fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
        let (_, rest) = text.split_once(start).unwrap_or_else(|| panic!("`{start}` is missing"));
        rest.split_once(end).unwrap_or_else(|| panic!("`{end}` is missing after `{start}`")).0
    }

    /// Declared pairs of a struct and a kernel, without the suffix for the element type.
    fn declared_pairs() -> BTreeSet<(String, String)> {
        let mut pairs = BTreeSet::new();
        for kernel in DECLARATIONS {
            pairs.extend(kernel.names.iter().map(|name| (kernel.structure.to_owned(), (*name).to_owned())));
        }
        pairs
    }

    /// Pairs of a struct and a kernel in the launches, with every possible value of a composed name.
    fn launched_pairs() -> BTreeSet<(String, String)> {
        let widths = between(ATTENTION, "const HEAD_WIDTHS: [usize; 3] = [", "]");
        let widths = widths.replace("WIDEST_SINGLE_QUERY", &WIDEST_SINGLE_QUERY.to_string());
        let widths: Vec<&str> = widths.split(", ").collect();
        let epilogues = between(PRODUCTS, "let (name, residual) = match finish {", "};");
        let epilogues: Vec<&str> =
            epilogues.split("=> (\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let mut pairs = BTreeSet::new();
        for source in [ATTENTION, NORM, PRODUCTS, TRAINING] {
            for (at, call) in source.match_indices("parameters.launch(device, ") {
                let (_, parameters) = source[..at].rsplit_once("let parameters = ").expect("a struct");
                let structure = first_token(parameters).expect("a struct").to_owned();
                let name = source[at + call.len()..].split('"').nth(1).expect("a name");
                let (prefix, values) = match name.split_once('{') {
                    None => (name, &[""][..]),
                    Some((prefix, "width}")) => (prefix, &widths[..]),
                    Some((prefix, "finish}")) => (prefix, &epilogues[..]),
                    Some(_) => panic!("unknown part of the name `{name}`"),
                };
                pairs.extend(values.iter().map(|value| (structure.clone(), format!("{prefix}{value}"))));
            }
        }
        pairs
    }

    /// Launches with a wrong kernel name would fail only on a GPU; this test finds them on the CPU.
    #[test]
    fn launches_match_the_declarations() {
        assert_eq!(launched_pairs(), declared_pairs());
    }

    /// Kernels without the suffix for the element type, by their names in the CPU test.
    ///
    /// A function that selects a kernel by width has several kernels.
    fn cpu_test_names(definition: &str) -> Vec<(&str, &str)> {
        let (mut found, mut name) = (Vec::new(), "");
        let words: Vec<&str> = tokens(definition).filter(|token| !token.trim().is_empty()).collect();
        for window in words.windows(3) {
            match *window {
                ["auto" | ",", next, "=" | "("] => name = next,
                [kernel, "#", "#"] => found.push((name, kernel.strip_suffix('_').expect("a suffix"))),
                _ => {}
            }
        }
        found
    }

    /// The emulated kernels are the only kernel tests without a GPU, so they must include every kernel.
    #[test]
    fn cpu_test_launches_every_kernel() {
        const DEFINITION: &str = "#define KERNELS_OF(NAME, T)";
        let lines = logical_lines(CPU_TEST);
        let definition = lines.iter().find_map(|line| line.strip_prefix(DEFINITION)).expect("the kernels");
        let others = lines.iter().filter(|line| !line.starts_with(DEFINITION));
        let text = others.map(String::as_str).collect::<Vec<_>>().join("\n");
        let launched: BTreeSet<&str> = text
            .match_indices("launch(")
            .flat_map(|(at, _)| {
                let call = &text[at + "launch".len()..];
                let call = &call[..call.len() - arguments(call).1.len()];
                call.split("Kernels<T>::").skip(1).filter_map(first_token)
            })
            .collect();
        let names = cpu_test_names(definition);
        let names = names.iter().filter(|(name, _)| launched.contains(name));
        let tested: BTreeSet<String> = names.map(|(_, kernel)| (*kernel).to_owned()).collect();
        let declared: BTreeSet<String> = declared_pairs().into_iter().map(|(_, name)| name).collect();
        assert_eq!(tested, declared);
        for (element, c_element) in ELEMENTS {
            for line in [format!("KERNELS_OF({element}, {c_element})"), format!("all<{c_element}>(")] {
                assert!(lines.iter().any(|found| found.starts_with(&line)), "`{line}` is missing");
            }
        }
    }

    #[test]
    fn macros_expand_in_macros_and_in_joined_lines() {
        let source = [
            "#define ONE(NAME, T) void f_##NAME(T x);",
            "#define BOTH(NAME) ONE(a_##NAME, int) \\",
            "  ONE(b_##NAME, float)",
            "BOTH(z) // ONE(c, int)",
            "ONE + BOTH",
        ];
        let text = expanded(&source.join("\n"));
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words.join(" "), "void f_a_z(int x); void f_b_z(float x); ONE + BOTH");
    }

    #[test]
    fn arguments_end_at_top_level_commas() {
        assert_eq!(arguments("(a, f(b, c) , (d)) rest"), (vec!["a", "f(b, c)", "(d)"], " rest"));
        assert_eq!(arguments("(T x)"), (vec!["T x"], ""));
        assert_eq!(tokens("a_##B*").collect::<Vec<_>>(), ["a_", "#", "#", "B", "*"]);
    }

    #[test]
    fn kernel_source_matches_the_declarations() {
        let mut declared = Signatures::new();
        for kernel in DECLARATIONS {
            for (name, (element, c_element)) in
                kernel.names.iter().flat_map(|name| ELEMENTS.map(|element| (name, element)))
            {
                let parameters = kernel.parameters.iter();
                let parameters =
                    parameters.map(|(name, declared)| ((*name).to_owned(), c_spelling(declared, c_element)));
                let signature = (kernel.threads.0.to_owned(), parameters.collect());
                declared.insert(format!("{name}_{element}"), signature);
            }
        }
        let found = source_signatures();
        assert_eq!(found.keys().collect::<Vec<_>>(), declared.keys().collect::<Vec<_>>());
        for (name, signature) in &declared {
            assert_eq!(&found[name], signature, "{name}");
        }
    }

    #[test]
    fn constants_match_the_kernel_source() {
        let text = expanded(SOURCE);
        let constant = |name: &str| -> Option<u32> {
            let (_, after) = text.split_once(&format!(" {name} = "))?;
            after.split(|letter| !is_word(letter)).next()?.parse().ok()
        };
        let widest = u32::try_from(WIDEST_SINGLE_QUERY).unwrap();
        let others = [
            ("MAX_LANES", MAX_LANES),
            ("MAX_ROWS", MAX_ROWS),
            ("ATTENTION_KEYS", ATTENTION_KEYS),
            ("SPLIT_BLOCKS", SPLIT_BLOCKS),
            ("NORM_COLUMNS", NORM_COLUMNS),
            ("WIDEST_HEAD", widest),
        ];
        for (name, value) in DECLARATIONS.iter().map(|kernel| kernel.threads).chain(others) {
            assert_eq!(constant(name), Some(value), "{name}");
        }
    }

    /// Compiled parameters: pointers and sizes are 64 bits wide, and structs are byte arrays.
    #[cfg(feature = "cuda")]
    #[test]
    fn compiled_kernels_match_the_declarations() {
        let in_ptx = |declared: &str| match declared {
            "u32" => ".u32".to_owned(),
            "f32" => ".f32".to_owned(),
            "Strides" => format!(".b8[{}]", size_of::<Strides>()),
            _ => ".u64".to_owned(),
        };
        let mut entries = 0;
        for text in KERNELS.split(".entry ").skip(1) {
            let (name, rest) = text.split_at(text.find('(').expect("parameters"));
            let (name, element) = name.trim().rsplit_once('_').expect("an element type");
            assert!(ELEMENTS.iter().any(|(known, _)| *known == element), "{name}_{element}");
            let kernel = DECLARATIONS.iter().find(|kernel| kernel.names.contains(&name));
            let kernel = kernel.unwrap_or_else(|| panic!("{name} is not declared"));
            // `.param .u64 .ptr .align 1 NAME`, `.param .align 8 .b8 NAME[24]`
            let found = arguments(rest).0.into_iter().map(|parameter| {
                let words: Vec<_> = parameter.split_whitespace().collect();
                let kind = words.iter().find(|word| [".u64", ".u32", ".f32", ".b8"].contains(word));
                let size = parameter.find('[').map_or("", |start| &parameter[start..]);
                format!("{}{size}", kind.unwrap_or(&"?"))
            });
            let declared = kernel.parameters.iter().map(|(_, declared)| in_ptx(declared));
            assert_eq!(found.collect::<Vec<_>>(), declared.collect::<Vec<_>>(), "{name}_{element}");
            entries += 1;
        }
        let names: usize = DECLARATIONS.iter().map(|kernel| kernel.names.len()).sum();
        assert_eq!(entries, names * ELEMENTS.len());
    }
}
