//! GGUF files: metadata, tensors in all their types, and the models and tokenizers that are made of
//! them.

#![no_main]

use anymesh_checkpoint::gguf::{File, Model};
use anymesh_checkpoint::{Error, Source};
use anymesh_fuzz::{SMALL, assert_regions_agree, scratch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let path = scratch().join("x.gguf");
    std::fs::write(&path, data).expect("writes");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(Error::Gguf { offset, .. }) => {
            assert!(offset <= data.len() as u64, "{offset} of {}", data.len());
            return;
        }
        Err(_) => return,
    };

    let metadata = file.metadata();
    for (key, value) in metadata.to_json() {
        assert_eq!(metadata.get(&key), Some(value.clone()));
        assert_eq!(metadata.shortened(&key, usize::MAX), Some(value.clone()));
        assert!(metadata.shortened(&key, 1).is_some());
        if let Some(text) = metadata.text(&key) {
            assert_eq!(value, text);
        }
        if let Some(texts) = metadata.texts(&key) {
            assert_eq!(value.as_array().map(Vec::len), Some(texts.count()));
        }
    }
    let stored = file
        .tensors()
        .keys()
        .filter_map(|name| file.stored_bytes(name));
    assert!(stored.max().unwrap_or(0) <= data.len());
    read(&file);
    drop(file.tokenizer());
    drop(file.tokenizer_config());

    let whole: Vec<usize> = file.tensors().values().map(|info| info.numel()).collect();
    if let Ok(model) = Model::new(file) {
        assert!(model.tensors().len() <= whole.len());
        read(&model);
    }
});

/// Everything that is small can be read, and regions are parts of it.
fn read(source: &impl Source) {
    for (name, info) in source
        .tensors()
        .iter()
        .take(32)
        .filter(|(_, info)| info.numel() <= SMALL)
    {
        let bytes = source.read_all(name).expect("it lies in the file");
        assert_regions_agree(source, name, info, &bytes);
    }
}
