//! The queue of a wgpu device: launches are recorded into command buffers, which are submitted a few
//! at a time.
//!
//! A launch needs a bind group, which names the buffers of the kernel, and a place where its numbers
//! lie. To make these takes longer than the launch, and a program launches the same kernels with the same
//! memory again and again, so both are kept.

use crate::memory::{Buffers, buffer};
use anymesh_kernel::Mixed;
use anymesh_launcher::{Function, Graph, Image, Launch, Queue, Stream, log};
use cubecl::{
    bytes::Bytes,
    future::DynFut,
    wgpu::wgpu::{self, BufferUsages},
};
use smallvec::SmallVec;
#[cfg(not(target_family = "wasm"))]
use std::collections::VecDeque;
use std::{
    borrow::Cow,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// Launches of a command buffer: few while the device has nothing to do, then more.
const FIRST: usize = 8;
const MOST: usize = 64;

/// Command buffers that may wait or run: what they use cannot be given back to the driver before.
#[cfg(not(target_family = "wasm"))]
const SUBMITTED: usize = 8;

/// Bytes of uploads that may wait for the next command buffer.
const WAITING: u64 = 64 << 20;

/// Bind groups, and lists of numbers, that are kept.
const KEPT: usize = 1 << 13;

/// Bytes of a buffer for numbers.
const PAGE: u64 = 1 << 16;

/// Up to here downloads go through buffers that are kept.
const STAGED: u64 = 1 << 20;

/// A kernel as the driver has it.
struct Loaded {
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    /// Whether its numbers are bound behind its buffers.
    has_info: bool,
}

/// What tells bind groups apart: the kernel, where its numbers lie, where its buffers do.
type Key = SmallVec<[u64; 16]>;

/// Where numbers lie.
#[derive(Clone)]
struct Words {
    page: wgpu::Buffer,
    offset: u64,
    bytes: u64,
}

/// A launch that was written down.
struct Recorded {
    key: Key,
    function: Function,
    grid: [u32; 3],
    places: SmallVec<[Range<u64>; 6]>,
    info: Vec<u64>,
}

/// The first thing that went wrong with a device: nothing that it computes counts from then on.
#[derive(Clone, Default)]
pub(crate) struct Lost(Arc<Mutex<Option<String>>>);

impl Lost {
    /// Watches a device.
    pub(crate) fn of(device: &wgpu::Device) -> Self {
        let lost = Self::default();
        let (errors, gone) = (lost.clone(), lost.clone());
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            errors.set(error.to_string())
        }));
        device.set_device_lost_callback(move |kind, message| {
            gone.set(format!("the device was lost ({kind:?}): {message}"));
        });
        lost
    }

    fn set(&self, why: String) {
        log::say(1, || why.clone());
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(why);
    }

    fn check(&self) -> Result<(), String> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }
}

/// The queue of a device.
pub(crate) struct WgpuQueue {
    device: wgpu::Device,
    queue: wgpu::Queue,
    buffers: Arc<Buffers>,
    lost: Lost,
    kernels: Vec<Loaded>,
    groups: Mixed<Key, wgpu::BindGroup>,
    words: Mixed<Box<[u64]>, Words>,
    /// The page that is being filled, and how far.
    page: Option<(wgpu::Buffer, u64)>,
    /// What is being recorded, and how many launches are in it.
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    launches: usize,
    limit: usize,
    /// Bytes of uploads since the last submission.
    waiting: u64,
    #[cfg(not(target_family = "wasm"))]
    submitted: VecDeque<wgpu::SubmissionIndex>,
    staging: Arc<Mutex<Vec<wgpu::Buffer>>>,
    /// Launches are written down here, and not run.
    recording: Option<Vec<Recorded>>,
}

impl WgpuQueue {
    pub(crate) fn new(
        device: wgpu::Device,
        queue: wgpu::Queue,
        buffers: Arc<Buffers>,
        lost: Lost,
    ) -> Self {
        Self {
            device,
            queue,
            buffers,
            lost,
            kernels: vec![],
            groups: Mixed::default(),
            words: Mixed::default(),
            page: None,
            encoder: None,
            pass: None,
            launches: 0,
            limit: FIRST,
            waiting: 0,
            #[cfg(not(target_family = "wasm"))]
            submitted: VecDeque::new(),
            staging: Arc::default(),
            recording: None,
        }
    }

    fn encoder<'e>(
        encoder: &'e mut Option<wgpu::CommandEncoder>,
        device: &wgpu::Device,
    ) -> &'e mut wgpu::CommandEncoder {
        encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// The encoder, outside of a pass.
    fn copies(&mut self) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        Self::encoder(&mut self.encoder, &self.device)
    }

    /// Hands over what was recorded.
    fn submit(&mut self) -> wgpu::SubmissionIndex {
        self.pass = None;
        let index = (self.queue).submit(self.encoder.take().map(wgpu::CommandEncoder::finish));
        self.launches = 0;
        self.waiting = 0;
        self.limit = (self.limit * 2).min(MOST);
        #[cfg(not(target_family = "wasm"))]
        {
            self.submitted.push_back(index.clone());
            if self.submitted.len() > SUBMITTED
                && let Some(oldest) = self.submitted.pop_front()
            {
                wait(&self.device, oldest);
            }
        }
        index
    }

    /// Does something that wgpu may refuse.
    fn checked<T>(&self, what: &str, make: impl FnOnce(&wgpu::Device) -> T) -> Result<T, String> {
        #[cfg(not(target_family = "wasm"))]
        {
            let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
            let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
            let made = make(&self.device);
            let (internal, validation) = (internal.pop(), validation.pop());
            let refused = cubecl::future::block_on(async { internal.await.or(validation.await) });
            match refused {
                Some(error) => Err(format!("the driver refused {what}: {error}")),
                None => Ok(made),
            }
        }
        // Nothing can be waited for in a browser: there it shows at the next read.
        #[cfg(target_family = "wasm")]
        {
            let _ = what;
            Ok(make(&self.device))
        }
    }

    /// Where these numbers lie.
    fn words(&mut self, info: &[u64]) -> Result<Words, String> {
        if let Some(known) = self.words.get(info) {
            return Ok(known.clone());
        }
        if self.words.len() >= KEPT {
            self.words.clear();
        }
        let bytes = size_of_val(info) as u64;
        let step = u64::from(self.device.limits().min_storage_buffer_offset_alignment);
        let room = |page: &(wgpu::Buffer, u64)| page.1 + bytes <= page.0.size();
        let (page, offset) = match self.page.take().filter(room) {
            Some(page) => page,
            None => {
                let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
                (buffer(&self.device, PAGE.max(bytes), usage, false)?, 0)
            }
        };
        // Nobody has read this part of the page, so it may be filled ahead of all that is recorded.
        let raw: Vec<u8> = info.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.queue.write_buffer(&page, offset, &raw);
        self.page = Some((page.clone(), (offset + bytes).next_multiple_of(step)));
        let words = Words {
            page,
            offset,
            bytes,
        };
        self.words.insert(info.into(), words.clone());
        Ok(words)
    }

    /// Makes the bind group of a launch, if there is none.
    fn bind_group(&mut self, launch: &Launch<'_>, key: &Key) -> Result<(), String> {
        if self.groups.contains_key(key) {
            return Ok(());
        }
        if self.groups.len() >= KEPT {
            self.groups.clear();
        }
        let words = match self.kernels[launch.function.0 as usize].has_info {
            true => Some(self.words(launch.info)?),
            false => None,
        };
        let bound = (launch.places.iter())
            .map(|place| self.buffers.at(place))
            .collect::<Result<SmallVec<[_; 8]>, String>>()?;
        let size = |bytes: u64| std::num::NonZero::new(bytes);
        let buffers = bound.iter().zip(launch.places);
        let buffers = buffers.map(|((buffer, offset), place)| wgpu::BufferBinding {
            buffer,
            offset: *offset,
            size: size(place.end - place.start),
        });
        let words = words.as_ref().map(|words| wgpu::BufferBinding {
            buffer: &words.page,
            offset: words.offset,
            size: size(words.bytes),
        });
        let entries: SmallVec<[_; 8]> = (0..)
            .zip(buffers.chain(words))
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: wgpu::BindingResource::Buffer(buffer),
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.kernels[launch.function.0 as usize].layout,
            entries: &entries,
        });
        self.groups.insert(key.clone(), group);
        Ok(())
    }

    /// What tells the bind group of a launch from others.
    fn key(launch: &Launch<'_>) -> Key {
        let places = launch.places.iter();
        let places = places.flat_map(|place| [place.start, place.end - place.start]);
        let ends = [launch.function.0, launch.places.len() as u64];
        ends.into_iter()
            .chain(places)
            .chain(launch.info.iter().copied())
            .collect()
    }

    fn record(&mut self, launch: &Launch<'_>, key: &Key) -> Result<(), String> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        // Bind groups hold buffers, also those that were given back to the driver.
        if self.buffers.were_given() {
            self.groups.clear();
        }
        self.bind_group(launch, key)?;
        let kernel = &self.kernels[launch.function.0 as usize];
        let encoder = Self::encoder(&mut self.encoder, &self.device);
        let pass = self.pass.get_or_insert_with(|| {
            let pass = encoder.begin_compute_pass(&Default::default());
            pass.forget_lifetime()
        });
        let [x, y, z] = launch.grid;
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, self.groups.get(key), &[]);
        pass.dispatch_workgroups(x, y, z);
        self.launches += 1;
        // Launches that are logged are handed over one by one, so that one that breaks the device is the
        // last one named.
        if self.launches >= self.limit || log::level() >= 2 {
            self.submit();
        }
        Ok(())
    }
}

/// Waits until a submission is done. That it cannot be waited for shows at the next read.
#[cfg(not(target_family = "wasm"))]
fn wait(device: &wgpu::Device, index: wgpu::SubmissionIndex) {
    let done = device.poll(wgpu::PollType::Wait {
        submission_index: Some(index),
        timeout: None,
    });
    if let Err(error) = done {
        log::say(1, || format!("waiting for the device: {error}"));
    }
}

/// The bytes around a range that can be copied.
fn copied(range: &Range<u64>) -> Range<u64> {
    let step = wgpu::COPY_BUFFER_ALIGNMENT;
    range.start / step * step..range.end.next_multiple_of(step)
}

impl Queue for WgpuQueue {
    fn bind(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn load(&mut self, image: &Image) -> Result<Function, String> {
        let text = std::str::from_utf8(&image.code).map_err(|e| e.to_string())?;
        let loaded = self.checked("the kernel", |device| {
            // SAFETY: our kernels stay within their buffers by themselves, and CubeCL's bounds are all
            // they rely on.
            let module = unsafe {
                device.create_shader_module_trusted(
                    wgpu::ShaderModuleDescriptor {
                        label: Some(&image.entry),
                        source: wgpu::ShaderSource::Wgsl(Cow::Borrowed(text)),
                    },
                    wgpu::ShaderRuntimeChecks::unchecked(),
                )
            };
            let entries: Vec<_> = (0..)
                .zip(&image.bound)
                .map(|(binding, written)| wgpu::BindGroupLayoutEntry {
                    binding,
                    visibility: wgpu::ShaderStages::COMPUTE,
                    ty: wgpu::BindingType::Buffer {
                        ty: wgpu::BufferBindingType::Storage {
                            read_only: !written,
                        },
                        has_dynamic_offset: false,
                        min_binding_size: None,
                    },
                    count: None,
                })
                .collect();
            let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: None,
                entries: &entries,
            });
            let of_pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&image.entry),
                layout: Some(&of_pipeline),
                module: &module,
                entry_point: Some(&image.entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            });
            Loaded {
                pipeline,
                layout,
                has_info: image.bound.len() > image.io.len(),
            }
        })?;
        self.kernels.push(loaded);
        Ok(Function(self.kernels.len() as u64 - 1))
    }

    unsafe fn launch(&mut self, launch: Launch<'_>) -> Result<(), String> {
        let key = Self::key(&launch);
        match &mut self.recording {
            None => self.record(&launch, &key),
            Some(recording) => {
                recording.push(Recorded {
                    key,
                    function: launch.function,
                    grid: launch.grid,
                    places: launch.places.into(),
                    info: launch.info.into(),
                });
                Ok(())
            }
        }
    }

    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), String> {
        let (target, offset) = self.buffers.at(&(to..to + bytes.len() as u64))?;
        if self.encoder.is_none() {
            // Before all that is recorded later.
            self.queue.write_buffer(&target, offset, bytes);
        } else {
            let size = bytes.len() as u64;
            let staged = buffer(&self.device, size, BufferUsages::COPY_SRC, true)?;
            (staged.get_mapped_range_mut(..).map_err(|e| e.to_string())?).copy_from_slice(bytes);
            staged.unmap();
            (self.copies()).copy_buffer_to_buffer(&staged, 0, &target, offset, size);
        }
        self.waiting += bytes.len() as u64;
        if self.waiting > WAITING {
            self.submit();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<Range<u64>>) -> DynFut<Result<Vec<Bytes>, String>> {
        let total: u64 = (parts.iter().map(copied))
            .map(|part| part.end - part.start)
            .sum();
        let kept = (total <= STAGED).then(|| {
            let mut free = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            free.pop()
        });
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let made = match kept.flatten() {
            Some(staged) => Ok(staged),
            None => buffer(&self.device, total.max(STAGED), usage, false),
        };
        let staged = match made {
            Ok(staged) => staged,
            Err(why) => return Box::pin(std::future::ready(Err(why))),
        };
        let (mut at, mut places) = (0, Vec::with_capacity(parts.len()));
        for part in &parts {
            let whole = copied(part);
            let (source, offset) = match self.buffers.at(&whole) {
                Ok(found) => found,
                Err(why) => return Box::pin(std::future::ready(Err(why))),
            };
            let bytes = whole.end - whole.start;
            (self.copies()).copy_buffer_to_buffer(&source, offset, &staged, at, bytes);
            let first = at + (part.start - whole.start);
            places.push(first as usize..(first + part.end - part.start) as usize);
            at += bytes;
        }
        let index = self.submit();
        // Nothing is on its way when this is there.
        self.limit = FIRST;
        let (tell, told) = cubecl_environment::future::channel::bounded(1);
        staged.map_async(wgpu::MapMode::Read, 0..total, move |done| {
            // Whoever asked may be gone.
            let _ = tell.try_send(done);
        });
        let (device, lost, free) = (self.device.clone(), self.lost.clone(), self.staging.clone());
        Box::pin(async move {
            #[cfg(not(target_family = "wasm"))]
            wait(&device, index);
            #[cfg(target_family = "wasm")]
            let _ = (device, index);
            let done = told.recv().await;
            lost.check()?;
            match done {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(format!("a download could not be mapped: {error}")),
                Err(_) => return Err("a download never came".into()),
            }
            let all = (staged.get_mapped_range(0..total)).map_err(|e| e.to_string())?;
            let cut = |place: Range<usize>| Bytes::from_bytes_vec(all[place].to_vec());
            let bytes = places.into_iter().map(cut).collect();
            drop(all);
            staged.unmap();
            if total <= STAGED {
                let mut free = free.lock().unwrap_or_else(PoisonError::into_inner);
                free.push(staged);
            }
            Ok(bytes)
        })
    }

    fn finish(&mut self) -> DynFut<Result<(), String>> {
        let index = self.submit();
        self.limit = FIRST;
        let (device, lost) = (self.device.clone(), self.lost.clone());
        #[cfg(target_family = "wasm")]
        let told = {
            let (tell, told) = cubecl_environment::future::channel::bounded(1);
            self.queue.on_submitted_work_done(move || {
                let _ = tell.try_send(());
            });
            told
        };
        Box::pin(async move {
            #[cfg(not(target_family = "wasm"))]
            wait(&device, index);
            #[cfg(target_family = "wasm")]
            {
                let _ = (device, index);
                let _ = told.recv().await;
            }
            lost.check()
        })
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn write_down(&mut self) -> Result<(), String> {
        self.recording = Some(vec![]);
        Ok(())
    }

    fn wait_for(&mut self, _: &[u32]) -> Result<(), String> {
        // wgpu finds out by itself what has to wait for what.
        Ok(())
    }

    fn written(&mut self) -> Result<Graph, String> {
        Ok(Box::new(self.recording.take().unwrap_or_default()))
    }

    fn replay(&mut self, graph: &Graph) -> Result<(), String> {
        let launches =
            (graph.downcast_ref::<Vec<Recorded>>()).ok_or("a graph of another device")?;
        for again in launches {
            let launch = Launch {
                function: again.function,
                grid: again.grid,
                block: [0; 3],
                shared: 0,
                places: &again.places,
                info: &again.info,
            };
            self.record(&launch, &again.key)?;
        }
        Ok(())
    }
}
