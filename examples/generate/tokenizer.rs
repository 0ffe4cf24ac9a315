//! Text to tokens and back: from `tokenizer.json`, or from what a GGUF file carries.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{anyhow, bail, ensure, Context, Result};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{
    decoders, normalizers, pre_tokenizers, AddedToken, DecoderWrapper, NormalizerWrapper,
    PreTokenizerWrapper, Tokenizer,
};

/// SentencePiece writes a space as this character.
const SPACE: &str = "\u{2581}";

/// Tokens that end a turn, whatever the configuration lists: fine-tuned models often stop at one
/// that their base model's configuration doesn't know.
const END_OF_TURN: [&str; 4] = ["<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>"];

/// Reads a `tokenizer.json`.
pub fn from_json(path: &Path) -> Result<Tokenizer> {
    Tokenizer::from_file(path)
        .map_err(|e| anyhow!("cannot read {} as a tokenizer.json: {e}", path.display()))
}

/// Builds the tokenizer that a GGUF file describes.
pub fn from_gguf(content: &Content) -> Result<Tokenizer> {
    let kind = match content.metadata.get("tokenizer.ggml.model") {
        Some(Value::String(kind)) => kind.as_str(),
        _ => bail!(
            "the GGUF file carries no tokenizer: put a tokenizer.json beside it or name one with \
             --tokenizer-file"
        ),
    };
    match kind {
        "gpt2" => byte_level_from_gguf(content),
        "llama" => sentencepiece(&SentencePieceVocab::from_gguf(content)?),
        other => bail!(
            "the GGUF file's tokenizer is of kind {other:?}, accepted are \"gpt2\" and \"llama\": \
             put a tokenizer.json beside it or name one with --tokenizer-file"
        ),
    }
}

/// Candle's reader, and then the splitting rules of those models whose rules it replaces by
/// GPT-2's: with the wrong rules a model still talks, but about tokens that it never saw in
/// training.
fn byte_level_from_gguf(content: &Content) -> Result<Tokenizer> {
    // One alternative a line: contractions, words, up to three digits, signs, line ends, spaces.
    const LLAMA3_WORDS: &str = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"|[^\r\n\p{L}\p{N}]?\p{L}+",
        r"|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+",
        r"|\s+(?!\S)|\s+",
    );

    let mut tokenizer = Tokenizer::from_gguf(content)?;
    let rules = match content.metadata.get("tokenizer.ggml.pre") {
        Some(Value::String(rules)) => rules.as_str(),
        _ => "default",
    };
    // No space is put before the text and the words are GPT-2's.
    let words = ByteLevel::new(false, true, true);
    let pre_tokenizer: PreTokenizerWrapper = match rules {
        "qwen2" => return Ok(tokenizer),
        "smollm" => {
            pre_tokenizers::sequence::Sequence::new(vec![Digits::new(true).into(), words.into()])
                .into()
        }
        "llama-bpe" | "llama3" | "llama-v3" => {
            let split = Split::new(
                SplitPattern::Regex(LLAMA3_WORDS.to_string()),
                SplitDelimiterBehavior::Isolated,
                false,
            )
            .map_err(|e| anyhow!("the word pattern of Llama 3: {e}"))?;
            if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
                let mut bpe = bpe.clone();
                bpe.ignore_merges = true;
                tokenizer.with_model(bpe);
            }
            pre_tokenizers::sequence::Sequence::new(vec![
                split.into(),
                ByteLevel::new(false, true, false).into(),
            ])
            .into()
        }
        "default" | "gpt-2" | "gpt2" => words.into(),
        // Whatever else Candle knows keeps Candle's rules.
        _ => return Ok(tokenizer),
    };
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    Ok(tokenizer)
}

/// What a token of a SentencePiece vocabulary is, by the numbers that GGUF files use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Takes part in merges.
    Normal,
    /// Steers the model and is never made from text by merging: unknown, control and unused tokens.
    Special,
    /// A string that always becomes one token.
    UserDefined,
    /// One byte, for characters that the vocabulary lacks.
    Byte,
}

/// A SentencePiece vocabulary of the BPE sort, as GGUF files of Gemma, Llama 2 and Mistral carry
/// it.
#[derive(Clone, Debug)]
struct SentencePieceVocab {
    tokens: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<Kind>,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// Whether text is read as if a space stood before it.
    add_space: bool,
}

impl SentencePieceVocab {
    fn from_gguf(content: &Content) -> Result<Self> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let array = |name: &str| -> Result<&Vec<Value>> {
            let key = key(name);
            match content.metadata.get(&key) {
                Some(Value::Array(values)) => Ok(values),
                _ => bail!("the GGUF file has no list {key:?}"),
            }
        };
        let flag = |name: &str, default: bool| match content.metadata.get(&key(name)) {
            Some(Value::Bool(value)) => *value,
            _ => default,
        };
        let id = |name: &str| content.metadata.get(&key(name)).and_then(to_id);

        let tokens = array("tokens")?
            .iter()
            .map(|v| v.to_string().cloned())
            .collect::<candle_core::Result<Vec<_>>>()?;
        let scores = array("scores")?
            .iter()
            .map(Value::to_f32)
            .collect::<candle_core::Result<Vec<_>>>()?;
        let kinds = array("token_type")?
            .iter()
            .map(|v| match to_id(v) {
                Some(1) => Ok(Kind::Normal),
                Some(2 | 3 | 5) => Ok(Kind::Special),
                Some(4) => Ok(Kind::UserDefined),
                Some(6) => Ok(Kind::Byte),
                _ => bail!("the GGUF file has a token of type {v:?}, accepted are 1 to 6"),
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            tokens,
            scores,
            kinds,
            bos: id("bos_token_id"),
            eos: id("eos_token_id"),
            unknown: id("unknown_token_id"),
            add_bos: flag("add_bos_token", true),
            add_eos: flag("add_eos_token", false),
            add_space: flag("add_space_prefix", true),
        })
    }

    fn token(&self, id: Option<u32>) -> Option<(&str, u32)> {
        let id = id?;
        self.tokens.get(id as usize).map(|t| (t.as_str(), id))
    }
}

/// SentencePiece's BPE as a `tokenizers` pipeline.
///
/// SentencePiece has no list of merges: it joins the adjacent pair whose joined string is the token
/// of highest score. So every way to cut a token into two tokens is a merge, ranked by the token's
/// score. Strings defined by the user are cut out of the text first, with spaces already written as
/// U+2581, as SentencePiece does.
fn sentencepiece(vocab: &SentencePieceVocab) -> Result<Tokenizer> {
    let n = vocab.tokens.len();
    ensure!(
        vocab.scores.len() == n && vocab.kinds.len() == n,
        "the vocabulary has {n} tokens, {} scores and {} types: the three must be of one length",
        vocab.scores.len(),
        vocab.kinds.len()
    );
    let mergeable: HashMap<&str, usize> = (0..n)
        .filter(|&id| vocab.kinds[id] == Kind::Normal)
        .map(|id| (vocab.tokens[id].as_str(), id))
        .collect();

    let mut merges: Vec<(usize, usize, usize)> = Vec::new();
    for (&token, &id) in &mergeable {
        for (cut, _) in token.char_indices().skip(1) {
            if let (Some(&left), Some(&right)) =
                (mergeable.get(&token[..cut]), mergeable.get(&token[cut..]))
            {
                merges.push((id, left, right));
            }
        }
    }
    // The last two keys make the order a fact of the vocabulary alone; the hash map's is not.
    merges.sort_unstable_by(|a, b| {
        vocab.scores[b.0]
            .total_cmp(&vocab.scores[a.0])
            .then(a.cmp(b))
    });
    let merges = merges
        .into_iter()
        .map(|(_, left, right)| (vocab.tokens[left].clone(), vocab.tokens[right].clone()))
        .collect();

    let ids: HashMap<String, u32> = vocab.tokens.iter().cloned().zip(0u32..).collect();
    let has_bytes = vocab.kinds.contains(&Kind::Byte);
    let mut bpe = BPE::builder()
        .vocab_and_merges(
            ids.into_iter().collect::<tokenizers::models::bpe::Vocab>(),
            merges,
        )
        .byte_fallback(has_bytes)
        .fuse_unk(true);
    if let Some((unknown, _)) = vocab.token(vocab.unknown) {
        bpe = bpe.unk_token(unknown.to_string());
    }
    let bpe = bpe
        .build()
        .map_err(|e| anyhow!("the vocabulary gives no BPE model: {e}"))?;
    let mut tokenizer = Tokenizer::new(bpe);

    let mut normalizer: Vec<NormalizerWrapper> = Vec::new();
    if vocab.add_space {
        normalizer.push(Prepend::new(SPACE.to_string()).into());
    }
    normalizer.push(Replace::new(" ", SPACE).map_err(|e| anyhow!("{e}"))?.into());
    tokenizer
        .with_normalizer(Some(normalizers::utils::Sequence::new(normalizer)))
        .map_err(|e| anyhow!("{e}"))?;

    let mut decoder: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(|e| anyhow!("{e}"))?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if vocab.add_space {
        decoder.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(decoders::sequence::Sequence::new(decoder)));

    let bos = vocab.token(vocab.bos).filter(|_| vocab.add_bos);
    let eos = vocab.token(vocab.eos).filter(|_| vocab.add_eos);
    let around: Vec<_> = bos.into_iter().chain(eos).collect();
    if !around.is_empty() {
        let text = |piece: &str| -> Vec<String> {
            let bos = bos.map(|(token, _)| token.to_string());
            let eos = eos.map(|(token, _)| token.to_string());
            bos.into_iter()
                .chain([piece.to_string()])
                .chain(eos)
                .collect()
        };
        let template = TemplateProcessing::builder()
            .try_single(text("$A"))
            .map_err(|e| anyhow!("{e}"))?
            .special_tokens(around)
            .build()?;
        tokenizer.with_post_processor(Some(template));
    }

    let of_kind = |kind: Kind| {
        (0..n)
            .filter(move |&id| vocab.kinds[id] == kind)
            .map(|id| vocab.tokens[id].clone())
    };
    tokenizer
        .add_special_tokens(of_kind(Kind::Special).map(|t| AddedToken::from(t, true)))
        .map_err(|e| anyhow!("{e}"))?;
    tokenizer
        .add_tokens(of_kind(Kind::UserDefined).map(|t| AddedToken::from(t, false).normalized(true)))
        .map_err(|e| anyhow!("{e}"))?;
    Ok(tokenizer)
}

/// GGUF writers use whatever integer type they like for ids.
pub fn to_id(value: &Value) -> Option<u32> {
    match *value {
        Value::U8(v) => Some(v.into()),
        Value::U16(v) => Some(v.into()),
        Value::U32(v) => Some(v),
        Value::U64(v) => v.try_into().ok(),
        Value::I8(v) => v.try_into().ok(),
        Value::I16(v) => v.try_into().ok(),
        Value::I32(v) => v.try_into().ok(),
        Value::I64(v) => v.try_into().ok(),
        _ => None,
    }
}

/// The tokens of a prompt, with the token that begins a text exactly once.
///
/// Some chat templates write that token and some leave it to the tokenizer, so asking the tokenizer
/// for it gives none, one or two. What the tokenizer puts after a text is dropped: the model is to
/// go on from there.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encode = |text: &str, special: bool| -> Result<Vec<u32>> {
        let encoding = tokenizer
            .encode(text, special)
            .map_err(|e| anyhow!("cannot tokenize the prompt: {e}"))?;
        Ok(encoding.get_ids().to_vec())
    };
    let bare = encode(text, false)?;
    let full = encode(text, true)?;
    // Of what was added, the part that stands before the text.
    let before = match full.windows(bare.len().max(1)).position(|w| w == bare) {
        _ if bare.is_empty() => &full[..full.len().min(1)],
        Some(at) => &full[..at],
        None => &full[..0],
    };
    let before = match (before.last(), bare.first()) {
        (Some(added), Some(first)) if added == first => &before[..before.len() - 1],
        _ => before,
    };
    Ok(before.iter().chain(&bare).copied().collect())
}

/// The tokens at which generation ends: those that the model's files list and those that by name
/// end a turn.
pub fn end_tokens(listed: &[u32], tokenizer: &Tokenizer) -> Vec<u32> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut ids: Vec<u32> = END_OF_TURN
        .iter()
        .filter_map(|name| tokenizer.token_to_id(name))
        .filter(|id| added.contains_key(id))
        .chain(listed.iter().copied())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Reads `eos_token_id` of a `config.json` or `generation_config.json`: absent, a number or a list.
pub fn eos_of_config(config: &serde_json::Value) -> Vec<u32> {
    let id = |v: &serde_json::Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
    match &config["eos_token_id"] {
        serde_json::Value::Array(ids) => ids.iter().filter_map(id).collect(),
        other => id(other).into_iter().collect(),
    }
}

/// Turns tokens into text as they come, never cutting a character in two.
///
/// A token can hold part of a character, and what a token reads as can depend on the one before it.
/// So the text is that of a short window of tokens, less the text of those of the window that were
/// printed before.
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// The window begins here; what precedes it is printed and can't change the text any more.
    start: usize,
    /// Tokens before this one are printed.
    printed: usize,
}

impl<'a> TokenStream<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: Vec::new(),
            start: 0,
            printed: 0,
        }
    }

    fn text(&self, from: usize, to: usize) -> Result<String> {
        self.tokenizer
            .decode(&self.tokens[from..to], true)
            .map_err(|e| anyhow!("cannot decode tokens {:?}: {e}", &self.tokens[from..to]))
    }

    /// Takes a token and gives the text that is now complete, if any.
    pub fn push(&mut self, token: u32) -> Result<Option<String>> {
        self.tokens.push(token);
        let text = self.text(self.start, self.tokens.len())?;
        // A character that isn't complete yet reads as U+FFFD.
        if text.ends_with('\u{FFFD}') {
            return Ok(None);
        }
        Ok(self.advance(&text))
    }

    /// Gives what is left, complete or not.
    pub fn finish(&mut self) -> Result<Option<String>> {
        let text = self.text(self.start, self.tokens.len())?;
        Ok(self.advance(&text))
    }

    fn advance(&mut self, text: &str) -> Option<String> {
        let before = self.text(self.start, self.printed).ok()?;
        let new = text.strip_prefix(before.as_str())?.to_string();
        if new.is_empty() {
            return None;
        }
        self.start = self.printed;
        self.printed = self.tokens.len();
        Some(new)
    }
}

/// The string of the token that a GGUF file names as `name` ("bos", "eos").
pub fn special_token_of_gguf(content: &Content, name: &str) -> Option<String> {
    let id = content
        .metadata
        .get(&format!("tokenizer.ggml.{name}_token_id"))
        .and_then(to_id)?;
    match content.metadata.get("tokenizer.ggml.tokens")? {
        Value::Array(tokens) => tokens.get(id as usize)?.to_string().ok().cloned(),
        _ => None,
    }
}

/// The string of the token that a `tokenizer_config.json` names as `name` ("bos_token",
/// "eos_token"): a string, or an object with the string as its content.
pub fn special_token_of_config(config: &serde_json::Value, name: &str) -> Option<String> {
    let token = &config[name];
    token
        .as_str()
        .or_else(|| token["content"].as_str())
        .map(str::to_string)
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<serde_json::Value> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Letters a to e, a few merges, all bytes: enough to show every rule.
    fn tiny(add_space: bool) -> SentencePieceVocab {
        let mut vocab = SentencePieceVocab {
            tokens: Vec::new(),
            scores: Vec::new(),
            kinds: Vec::new(),
            bos: Some(0),
            eos: Some(1),
            unknown: Some(2),
            add_bos: true,
            add_eos: false,
            add_space,
        };
        let mut push = |token: &str, score: f32, kind: Kind| {
            vocab.tokens.push(token.to_string());
            vocab.scores.push(score);
            vocab.kinds.push(kind);
        };
        push("<bos>", -1000.0, Kind::Special); // 0
        push("<eos>", -1000.0, Kind::Special); // 1
        push("<unk>", -1000.0, Kind::Special); // 2
        push("<turn>", -1000.0, Kind::Special); // 3
        push("\n\n", -1000.0, Kind::UserDefined); // 4
        push("\u{2581}\u{2581}", -1000.0, Kind::UserDefined); // 5
        push("bc", -1.0, Kind::Normal); // 6
        push("ab", -2.0, Kind::Normal); // 7
        push("abc", -3.0, Kind::Normal); // 8
        push("\u{2581}a", -4.0, Kind::Normal); // 9
        for letter in ["a", "b", "c", "d", "e", "\u{2581}", "\n"] {
            push(letter, -9.0, Kind::Normal); // 10 to 16
        }
        for byte in 0..=255u8 {
            push(&format!("<0x{byte:02X}>"), 0.0, Kind::Byte); // 17 on
        }
        vocab
    }

    pub fn tiny_tokenizer() -> Tokenizer {
        sentencepiece(&tiny(false)).expect("the tiny vocabulary is complete")
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    #[test]
    fn the_pair_of_highest_score_is_merged_first() {
        let tokenizer = tiny_tokenizer();
        // "bc" outranks "ab", then "a" + "bc" is "abc".
        assert_eq!(ids(&tokenizer, "abc"), [8]);
        assert_eq!(ids(&tokenizer, "abd"), [7, 13]);
        // "ab" + "c" is never reached here: "bc" takes the b.
        assert_eq!(ids(&tokenizer, "bcabc"), [6, 8]);
        assert_eq!(ids(&tokenizer, "a a"), [10, 9]);
    }

    #[test]
    fn strings_of_the_user_and_special_tokens_are_cut_out_first() {
        let tokenizer = tiny_tokenizer();
        assert_eq!(ids(&tokenizer, "a\n\nb"), [10, 4, 11]);
        // Two spaces are one token, although "\u{2581}a" has the better score.
        assert_eq!(ids(&tokenizer, "b  a"), [11, 5, 10]);
        assert_eq!(ids(&tokenizer, "a<turn>b"), [10, 3, 11]);
    }

    #[test]
    fn what_the_vocabulary_lacks_becomes_bytes_and_comes_back() {
        let tokenizer = tiny_tokenizer();
        assert_eq!(ids(&tokenizer, "é"), [17 + 0xC3, 17 + 0xA9]);
        // A byte token's name in a text is text.
        assert!(ids(&tokenizer, "<0x41>").len() > 1);
        for text in ["abc  de\n\nab é 漢字 🙂", " a", "a ", "<0x41>"] {
            assert_eq!(
                tokenizer.decode(&ids(&tokenizer, text), true).unwrap(),
                text
            );
        }
    }

    #[test]
    fn a_space_before_the_text_only_where_the_vocabulary_says_so() {
        let tokenizer = sentencepiece(&tiny(true)).unwrap();
        assert_eq!(ids(&tokenizer, "a"), [9]);
        assert_eq!(tokenizer.decode(&[9], true).unwrap(), "a");
        assert_eq!(ids(&tiny_tokenizer(), "a"), [10]);
    }

    #[test]
    fn lists_of_unequal_length_are_an_error() {
        let mut vocab = tiny(false);
        vocab.scores.pop();
        let message = sentencepiece(&vocab).unwrap_err().to_string();
        assert!(message.contains("of one length"), "{message}");
    }

    #[test]
    fn the_prompt_begins_exactly_once() {
        let tokenizer = tiny_tokenizer();
        assert_eq!(encode_prompt(&tokenizer, "ab").unwrap(), [0, 7]);
        assert_eq!(encode_prompt(&tokenizer, "<bos>ab").unwrap(), [0, 7]);
        assert_eq!(encode_prompt(&tokenizer, "").unwrap(), [0]);
        let mut vocab = tiny(false);
        vocab.add_bos = false;
        let tokenizer = sentencepiece(&vocab).unwrap();
        assert_eq!(encode_prompt(&tokenizer, "ab").unwrap(), [7]);
        assert_eq!(encode_prompt(&tokenizer, "<bos>ab").unwrap(), [0, 7]);
    }

    #[test]
    fn nothing_is_put_after_the_prompt() {
        let mut vocab = tiny(false);
        vocab.add_eos = true;
        let tokenizer = sentencepiece(&vocab).unwrap();
        assert_eq!(encode_prompt(&tokenizer, "ab").unwrap(), [0, 7]);
    }

    #[test]
    fn end_tokens_are_those_listed_and_those_known_by_name() {
        let mut vocab = tiny(false);
        vocab.tokens[3] = "<end_of_turn>".to_string();
        let tokenizer = sentencepiece(&vocab).unwrap();
        assert_eq!(end_tokens(&[1, 1], &tokenizer), [1, 3]);
        assert_eq!(end_tokens(&[], &tiny_tokenizer()), [] as [u32; 0]);
    }

    #[test]
    fn eos_is_a_number_a_list_or_absent() {
        let parse = |text: &str| eos_of_config(&serde_json::from_str(text).unwrap());
        assert_eq!(parse(r#"{"eos_token_id": 2}"#), [2]);
        assert_eq!(parse(r#"{"eos_token_id": [1, 106]}"#), [1, 106]);
        assert_eq!(parse(r#"{"eos_token_id": null}"#), [] as [u32; 0]);
        assert_eq!(parse("{}"), [] as [u32; 0]);
    }

    #[test]
    fn a_special_token_is_a_string_or_an_object() {
        let config =
            serde_json::from_str(r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#)
                .unwrap();
        let token = |name| special_token_of_config(&config, name);
        assert_eq!(token("bos_token").as_deref(), Some("<s>"));
        assert_eq!(token("eos_token").as_deref(), Some("</s>"));
        assert_eq!(token("pad_token"), None);
    }

    #[test]
    fn characters_are_printed_whole() {
        let tokenizer = tiny_tokenizer();
        let text = "ab é  漢🙂c";
        let mut stream = TokenStream::new(&tokenizer);
        let mut pieces = Vec::new();
        for id in ids(&tokenizer, text) {
            pieces.extend(stream.push(id).unwrap());
        }
        assert_eq!(stream.finish().unwrap(), None);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|p| !p.contains('\u{FFFD}')), "{pieces:?}");
        assert!(pieces.contains(&"🙂".to_string()), "{pieces:?}");
    }

    #[test]
    fn a_character_left_incomplete_is_given_at_the_end() {
        let tokenizer = tiny_tokenizer();
        let mut stream = TokenStream::new(&tokenizer);
        assert_eq!(stream.push(10).unwrap().as_deref(), Some("a"));
        assert_eq!(stream.push(17 + 0xC3).unwrap(), None);
        assert_eq!(stream.finish().unwrap().as_deref(), Some("\u{FFFD}"));
    }
}
