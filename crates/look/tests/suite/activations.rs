//! Tests of activations in memory and in files.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, safetensors};
use candle_gpt2::Site;
use candle_gpt2_interpret::{Ablate, Chain, named_site, named_sites};
use candle_gpt2_look::{Activations, CacheFormat, LookSubject, Numbers};
use candle_gpt2_testing::{assert_close, values};

use crate::common::{Case, built_in, reader, words};

fn all(n_layer: usize) -> Activations {
    Activations {
        text: words("The dog sat"),
        sites: Site::all(n_layer),
        layers: None,
        positions: None,
        numbers: Numbers::Raw,
    }
}

#[test]
fn streamed_activations_equal_the_cached_ones() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let positions = Some("0,1-2".parse().unwrap());
    for (numbers, positions) in
        [(Numbers::Raw, None), (Numbers::TransformerLens, None), (Numbers::TransformerLens, positions)]
    {
        let activations = Activations { numbers, positions, ..all(7) };
        let checked = activations.check(&reader).unwrap();
        let cached = activations.cached(&checked, &subject).unwrap();
        let mut streamed = BTreeMap::new();
        let mut order = Vec::new();
        let logits = activations.observed(&checked, &subject, &mut Chain(Vec::new()), &mut |site, value| {
            order.push(site);
            streamed.insert(site.to_string(), value);
            Ok(())
        });
        assert_eq!(order, activations.sites);
        assert_eq!(logits.unwrap().dims(), [1, cached.tokens.len(), 4096], "logits of every token");
        assert_eq!(streamed.len(), 6 + 18 * 7);
        for (name, value) in &streamed {
            assert_eq!(value.dims(), cached.tensors[name].dims(), "{name}");
            assert_eq!(values(value), values(&cached.tensors[name]), "{name}");
        }
    }
}

#[test]
fn observer_changes_only_later_activations() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let sites = named_sites("1.resid_post,2.resid_pre,2.z", 7).unwrap();
    let activations = Activations { sites, ..all(7) };
    let checked = activations.check(&reader).unwrap();
    let plain = activations.cached(&checked, &subject).unwrap().tensors;
    let mut zero = Ablate::zero(named_site("2.resid_pre").unwrap()).unwrap();
    let mut is_same = Vec::new();
    activations
        .observed(&checked, &subject, &mut zero, &mut |site, value| {
            is_same.push(values(&value) == values(&plain[&site.to_string()]));
            Ok(())
        })
        .unwrap();
    assert_eq!(is_same, [true, false, false]);
}

#[test]
fn written_files_contain_the_cached_tensors() {
    let case = Case::open("untied");
    let reader = reader(&case.loaded);
    let subject = LookSubject::new(&case.loaded, "a model".into(), &reader);
    let sites = named_sites("z,pattern,logits", case.loaded.config().n_layer).unwrap();
    let layers = Some(vec![1].into());
    let activations = Activations { text: case.text("clean_ids"), sites, layers, ..all(1) };
    let checked = activations.check(&reader).unwrap();
    let cached = activations.cached(&checked, &subject).unwrap();
    let expected = candle_gpt2_testing::Fixture::open("inside/untied/raw");
    assert_close(
        &cached.tensors["blocks.1.attn.hook_z"],
        &expected.tensor("blocks.1.attn.hook_z"),
        1e-5,
        "z",
    );
    let folder = tempfile::tempdir().unwrap();
    for (name, format) in [("a.safetensors", CacheFormat::Safetensors), ("a.npz", CacheFormat::Npz)] {
        let path = folder.path().join(name);
        assert_eq!(CacheFormat::of(&path).unwrap(), format);
        let bytes = cached.write(&path, format).unwrap();
        assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());
        let read: BTreeMap<String, Tensor> = match format {
            CacheFormat::Safetensors => safetensors::load(&path, &Device::Cpu).unwrap().into_iter().collect(),
            CacheFormat::Npz => Tensor::read_npz(&path).unwrap().into_iter().collect(),
        };
        assert_eq!(read.keys().collect::<Vec<_>>(), cached.tensors.keys().collect::<Vec<_>>());
        for (name, value) in &read {
            assert_eq!(values(value), values(&cached.tensors[name]), "{name}");
        }
    }
    let other = CacheFormat::of("a.txt".as_ref()).unwrap_err();
    assert_eq!(other.to_string(), "`out` a.txt: expected a file name ending in .safetensors or .npz");
    // A failed write leaves no file behind.
    let nowhere = folder.path().join("no-folder").join("a.npz");
    assert!(!cached.write(&nowhere, CacheFormat::Npz).unwrap_err().is_usage());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}
