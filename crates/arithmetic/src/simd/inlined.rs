//! Checks the test program's machine code: every job must be inlined into its instruction sets.
//!
//! A function compiled without an instruction set's features cannot inline an intrinsic that needs them. It
//! calls the intrinsic each time, with the vectors in memory, which makes products ten times slower. A
//! closure becomes such a function wherever the compiler does not inline it. Functions compiled for an
//! instruction set may therefore call only code that panics, allocates or copies memory. Instruction sets
//! that this processor lacks are compiled and checked too.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[test]
#[expect(clippy::print_stdout, reason = "reports what is not checked")]
fn jobs_are_inlined_into_their_instruction_sets() {
    println!("not checked: this test reads only x86-64 machine code in ELF files");
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod elf {
    use std::collections::{BTreeMap, BTreeSet, HashMap};

    use addr2line::gimli::{Dwarf, EndianSlice, Error, LittleEndian, SectionId};
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
    use object::{Object, ObjectSection, ObjectSymbol, ObjectSymbolTable, RelocationTarget, SymbolKind};

    /// Instruction sets: the type, the function compiled for it, and the minimum number of jobs.
    ///
    /// The minimum makes the test fail if it no longer finds the functions, for example after they are
    /// renamed.
    const SETS: [(&str, &str, usize); 4] = [
        ("simd::avx2::Avx2<_>", "run::compiled", 20),
        ("simd::avx2::Avx2<_>", "run::compiled_with_vnni", 5),
        ("simd::avx512::Avx512<B>", "run::compiled", 20),
        ("simd::avx512::Avx512<B>", "run::compiled_with_vnni", 5),
    ];

    /// Rust functions that jobs may call, identified by parts of their names.
    const ALLOWED: [&str; 25] = [
        // Functions that panic or write the panic message.
        "core::panicking::",
        "core::fmt::",
        "core::option::unwrap_failed",
        "core::option::expect_failed",
        "core::result::unwrap_failed",
        "core::slice::index::slice_",
        // Checks pointers if debug assertions are enabled.
        "core::slice::raw::from_raw_parts",
        // Functions that copy values or fill memory with one value.
        "core::slice::copy_from_slice_impl",
        "core::slice::specialize::SpecFill",
        // Functions that zip iterators or fill memory. No vector passes through them.
        "as core::iter::adapters::zip::ZipImpl<A,B>>::new",
        "core::slice::<impl [T]>::fill",
        // Scalar functions in plain Rust.
        "libm::math::",
        // Separate jobs, compiled for the same instructions.
        "simd::job::Simd>::run::compiled",
        "simd::vectors::Vectors>::call",
        // Scalar model of tiles, which only tests run.
        "simd::tiles::Model as",
        // Functions that allocate memory, fill it with one value, or free it.
        "__rust_",
        "alloc::alloc::handle_alloc_error",
        "alloc::raw_vec::",
        "alloc::vec::from_elem",
        "<alloc::vec::Vec<T,A> as core::clone::Clone>::clone",
        "alloc::vec::spec_from_elem::",
        "alloc::vec::Vec<T,A> as core::ops::drop::Drop",
        "alloc::vec::Vec<T,A>::resize",
        "alloc::vec::Vec<T,A>::extend_with",
        "core::ptr::drop_in_place",
    ];
    /// C library functions that jobs may call, and the function that resumes unwinding.
    const ALLOWED_SYMBOLS: [&str; 6] = ["_Unwind_Resume", "memcpy", "memmove", "memset", "memcmp", "bcmp"];

    type Bytes<'a> = EndianSlice<'a, LittleEndian>;

    /// Executable file, its functions and its line tables.
    struct Program<'a> {
        file: object::File<'a>,
        /// Size and name of each function, by address.
        functions: BTreeMap<u64, (u64, String)>,
        /// Function whose address the loader writes to each slot.
        slots: HashMap<u64, String>,
        lines: addr2line::Context<Bytes<'a>>,
    }

    impl<'a> Program<'a> {
        fn read(bytes: &'a [u8]) -> Self {
            let file = object::File::parse(bytes).unwrap();
            let symbols = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
            let functions: BTreeMap<_, _> = symbols
                .map(|symbol| (symbol.address(), (symbol.size(), demangled(symbol.name().unwrap()))))
                .collect();
            let imported = file.dynamic_symbol_table().unwrap();
            let slots = file.dynamic_relocations().unwrap().filter_map(|(slot, relocation)| {
                let name = match relocation.target() {
                    RelocationTarget::Symbol(index) => {
                        demangled(imported.symbol_by_index(index).unwrap().name().unwrap())
                    }
                    _ => functions.get(&relocation.addend().cast_unsigned())?.1.clone(),
                };
                Some((slot, name))
            });
            let slots = slots.collect();
            let section = |id: SectionId| {
                let section = file.section_by_name(id.name());
                let data = section.map_or(&[][..], |section| section.data().unwrap());
                Ok::<_, Error>(EndianSlice::new(data, LittleEndian))
            };
            let lines = addr2line::Context::from_dwarf(Dwarf::load(section).unwrap()).unwrap();
            Self { file, functions, slots, lines }
        }

        fn instructions(&self, start: u64, size: u64) -> Vec<Instruction> {
            let mut sections = self.file.sections();
            let code = sections.find_map(|section| section.data_range(start, size).unwrap());
            Decoder::with_ip(64, code.unwrap(), start, DecoderOptions::NONE).into_iter().collect()
        }

        /// Returns the name and line of each function inlined at `address`, innermost first.
        fn frames(&self, address: u64) -> Vec<(String, String)> {
            let mut frames = self.lines.find_frames(address).skip_all_loads().unwrap();
            let frames = std::iter::from_fn(|| frames.next().unwrap());
            let described = frames.map(|frame| {
                let name = frame.function.map(|name| name.raw_name().unwrap().into_owned());
                let line = frame.location.map(|line| {
                    format!("{}:{}", line.file.unwrap_or_default(), line.line.unwrap_or_default())
                });
                (name.unwrap_or_default(), line.unwrap_or_default())
            });
            described.collect()
        }

        /// Returns the innermost line of this crate for the instruction at `address`.
        fn line(&self, address: u64) -> String {
            let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
            let frames = self.frames(address);
            // The compiler assigns line 0 to moved code.
            let mut lines = frames.iter().filter_map(|(_, line)| line.strip_prefix(root));
            lines.find(|line| !line.ends_with(":0")).unwrap_or_default().to_owned()
        }

        /// Returns the name of the function at `address`; follows the jump if that is a linker stub.
        fn name(&self, address: u64) -> String {
            const STUB: u64 = 16;
            if let Some((_, name)) = self.functions.get(&address) {
                return name.clone();
            }
            let stub = self.instructions(address, STUB);
            let jump = stub.iter().find(|instruction| instruction.mnemonic() == Mnemonic::Jmp);
            jump.map_or_else(|| format!("{address:#x}"), |jump| self.name_in(jump.ip_rel_memory_address()))
        }

        /// Returns the name of the function whose address the loader writes to `slot`.
        fn name_in(&self, slot: u64) -> String {
            self.slots.get(&slot).cloned().unwrap_or_else(|| format!("a pointer at {slot:#x}"))
        }

        /// Returns the function whose address the instruction loads into a register.
        fn loaded(&self, instruction: &Instruction) -> Option<String> {
            let is_load =
                instruction.is_ip_rel_memory_operand() && instruction.op0_kind() == OpKind::Register;
            let address = instruction.memory_displacement64();
            match instruction.mnemonic() {
                Mnemonic::Mov if is_load => self.slots.get(&address).cloned(),
                Mnemonic::Lea if is_load => self.functions.get(&address).map(|(_, name)| name.clone()),
                _ => None,
            }
        }

        /// Returns the functions that the code at `start` calls or references, with the location of each.
        fn calls(&self, start: u64, size: u64) -> Vec<(u64, String)> {
            let instructions = self.instructions(start, size);
            let loads = instructions.iter().any(|instruction| self.loaded(instruction).is_some());
            let callee = |instruction: &Instruction| {
                let is_call = instruction.mnemonic() == Mnemonic::Call;
                match instruction.op0_kind() {
                    OpKind::NearBranch64 => {
                        let target = instruction.near_branch_target();
                        let leaves = is_call || !(start..start + size).contains(&target);
                        leaves.then(|| self.name(target))
                    }
                    OpKind::Memory if instruction.is_ip_rel_memory_operand() => {
                        let leaves = is_call || instruction.mnemonic() == Mnemonic::Jmp;
                        leaves.then(|| self.name_in(instruction.memory_displacement64()))
                    }
                    // A callee's address is often in a register or spilled to the
                    // stack. The call is counted where the address is loaded.
                    OpKind::Register if is_call && loads => None,
                    OpKind::Memory if is_call && loads && instruction.memory_base() == Register::RSP => None,
                    OpKind::Register | OpKind::Memory if is_call => Some("a pointer".to_owned()),
                    // Other jumps come from a `match`.
                    _ => self.loaded(instruction),
                }
            };
            let calls = instructions.iter().filter_map(|call| Some((call.ip(), callee(call)?)));
            calls.collect()
        }
    }

    fn demangled(name: &str) -> String {
        format!("{:#}", rustc_demangle::demangle(name))
    }

    fn is_allowed(callee: &str) -> bool {
        ALLOWED_SYMBOLS.contains(&callee) || ALLOWED.iter().any(|part| callee.contains(part))
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads machine code")]
    fn jobs_are_inlined_into_their_instruction_sets() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let program = Program::read(&bytes);
        let mut found = SETS.map(|_| BTreeSet::new());
        let mut stray = BTreeMap::<_, BTreeSet<_>>::new();
        for (start, (size, name)) in &program.functions {
            // In the compiler's newer mangling scheme, type arguments follow this separator.
            let path = name.split("::<").next().unwrap_or_default();
            let is_set =
                |(set, function, _): &(&str, &str, usize)| path.contains(set) && path.ends_with(function);
            let Some(index) = SETS.iter().position(is_set) else { continue };
            // The list of frames is empty if nothing was inlined into the function.
            let job = program.frames(*start).pop().unwrap_or_default().0;
            let job = job.replace(concat!(env!("CARGO_CRATE_NAME"), "::"), "");
            // Jobs in tests may be slow, so their calls are not checked.
            if job.contains("tests::") {
                continue;
            }
            for (address, callee) in program.calls(*start, *size) {
                if !is_allowed(&callee) {
                    let jobs = stray.entry((callee, program.line(address))).or_default();
                    let (set, ..) = SETS[index];
                    jobs.insert(format!("{set}, {job}"));
                }
            }
            if !job.is_empty() {
                found[index].insert(job);
            }
        }
        for (jobs, (set, function, least)) in found.iter().zip(SETS) {
            assert!(
                jobs.len() >= least,
                "{set}::{function} has {} jobs, not {least}; names are from `debug = \"line-tables-only\"`",
                jobs.len()
            );
        }
        let list = stray.iter().map(|((callee, line), jobs)| {
            let jobs: Vec<_> = jobs.iter().map(String::as_str).collect();
            format!("{callee}\n  called at {line}\n  by {}\n", jobs.join("\n     "))
        });
        assert!(stray.is_empty(), "calls that leave their instruction set:\n{}", list.collect::<String>());
    }
}
