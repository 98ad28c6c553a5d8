//! Tokens written once and read often.

use super::{Documents, Megatron, MegatronWriter, TokenType, file::hash, parallel::in_order};
use crate::{Error, Result};
use std::{fs, path::Path};

/// What [`tokenize`] wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokenization {
    /// Documents.
    pub documents: u64,
    /// Tokens in all of them.
    pub tokens: u64,
}

/// Writes all documents as a pair of files that Megatron's tools read too: `path.bin` and
/// `path.idx`. Documents are tokenized on all cores; `progress` is told how many of how many are
/// done.
pub fn tokenize(
    documents: &dyn Documents,
    path: impl AsRef<Path>,
    vocabulary: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Tokenization> {
    let mut writer = MegatronWriter::create(path, TokenType::for_vocabulary(vocabulary))?;
    let (count, mut done) = (documents.count(), Tokenization::default());
    let make = |index| {
        let document = documents.document(index)?;
        let beyond = document.tokens.iter().find(|t| **t as usize >= vocabulary);
        let wrong = match (beyond, document.prompt, document.class) {
            (Some(token), _, _) => {
                format!(
                    "document {index} has the token {token}, which is not in a vocabulary of {vocabulary}"
                )
            }
            (None, 0, None) => return Ok(document.tokens),
            _ => format!(
                "document {index} has a prompt or a class, which a file of tokens cannot hold: read it as it is"
            ),
        };
        Err(Error::config("data", wrong))
    };
    in_order(count, make, |tokens: Vec<u32>| {
        writer.document(&tokens)?;
        done.documents += 1;
        done.tokens += tokens.len() as u64;
        progress(done.documents, count);
        Ok(())
    })?;
    if done.tokens == 0 {
        let detail = format!("none of {count} documents has a token: there is nothing to learn");
        return Err(Error::config("data", detail));
    }
    writer.finish()?;
    Ok(done)
}

/// [`tokenize`] into a folder, under a name of what the documents are made from; where that was
/// done before, and the files are whole, they are opened.
pub fn tokenize_once(
    documents: &dyn Documents,
    folder: impl AsRef<Path>,
    vocabulary: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Megatron> {
    let folder = folder.as_ref();
    let key = hash(format!("{} {vocabulary}", documents.describe()).as_bytes());
    let path = folder.join(format!("tokens-{key:016x}"));
    if let Ok(found) = Megatron::open(&path, vocabulary) {
        return Ok(found);
    }
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", &e))?;
    tokenize(documents, &path, vocabulary, progress)?;
    Megatron::open(&path, vocabulary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Document, Form, JsonLines, Memory, Tokenized, Tokenizer, tests::Folder};
    use std::sync::Arc;

    #[test]
    fn documents_are_written_in_order_and_once() {
        let folder = Folder::new("tokenize");
        let lines: String = (0..500)
            .map(|i| format!("{{\"text\": \"text {i}\"}}\n"))
            .collect();
        let path = folder.write("a.jsonl", lines.as_bytes());
        let open = || {
            let records = Arc::new(JsonLines::open(&path).expect("lines"));
            Tokenized::new(records, Arc::new(Tokenizer::bytes()), Form::default())
        };
        let documents = open();
        let mut calls = 0;
        let mut once = |documents: &Tokenized| {
            let cache = folder.path().join("cache");
            tokenize_once(documents, cache, 257, &mut |_, _| calls += 1).expect("tokenized")
        };
        let pair = once(&documents);
        for index in 0..500 {
            let expected = documents.document(index).expect("a line");
            assert_eq!(pair.document(index).expect("written"), expected);
        }
        once(&open());
        // Another file under the same name is tokenized again; so is one whose tokens are damaged.
        fs::write(&path, lines.replace("text 7", "else 7")).expect("ours");
        let changed = once(&open());
        let text = changed.document(7).expect("written").tokens;
        assert_eq!(Tokenizer::bytes().decode(&text).expect("text"), "else 7");
        let written = fs::read_dir(folder.path().join("cache")).expect("ours");
        for entry in written.filter_map(Result::ok) {
            fs::write(entry.path(), b"MMID").expect("ours");
        }
        assert_eq!(once(&open()).document(7).expect("written").tokens, text);
        assert_eq!(calls, 3 * 500);
    }

    #[test]
    fn what_cannot_be_written_is_refused_and_leaves_nothing() {
        let folder = Folder::new("tokenize-not");
        let mut prompt = Document::new([1, 2]);
        prompt.prompt = 1;
        for (documents, said) in [
            (vec![Document::new([1]), prompt], "document 1 has a prompt"),
            (vec![Document::new([1]), Document::new([9])], "the token 9"),
            (vec![], "nothing to learn"),
            (vec![Document::new([])], "nothing to learn"),
        ] {
            let path = folder.path().join("t");
            let error = tokenize(&Memory::new(documents), path, 9, &mut |_, _| {});
            let error = error.expect_err(said);
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(fs::read_dir(folder.path()).expect("ours").count(), 0);
        }
    }
}
