//! Makes the launches of a plan.

use crate::{
    Options,
    cache::Cache,
    graph::{Graph, Node, fusable},
    plan::{Fused, Plan, Planner, Step},
    value::{self, State},
};
use anymesh_kernel::{
    Buffer, Device, Error, Kernel, Result, View,
    backend::{MapCall, MapInput},
};
use std::sync::Arc;

/// Runs lists of launches on the device below.
pub(crate) struct Runner {
    inner: Device,
    queue: u64,
    options: Options,
    planner: Planner,
    cache: Cache,
    /// What went wrong first since somebody was told.
    fault: Option<Error>,
}

impl Runner {
    pub(crate) fn new(inner: &Device, queue: u64, options: &Options) -> Self {
        Self {
            inner: inner.clone(),
            queue,
            options: options.clone(),
            planner: Planner::default(),
            cache: Cache::new(options.plans),
            fault: None,
        }
    }

    pub(crate) fn take_fault(&mut self) -> Option<Error> {
        self.fault.take()
    }

    pub(crate) fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    /// Runs a list. What fails is an error of its results.
    pub(crate) fn run(&mut self, nodes: Vec<Node>) {
        let plan = self.plan(&nodes);
        let mut nodes: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
        for dead in &plan.dead {
            nodes[*dead as usize] = None;
        }
        // What a device queues as a list costs it one call where the list came before.
        let inner = self.inner.clone();
        inner.backend().as_list(&mut || {
            for (step, gone) in plan.steps.iter().zip(&plan.after) {
                match step {
                    Step::Single(node) => self.single(&nodes, *node),
                    Step::Fused(fused) => self.fused(&nodes, fused),
                }
                for node in gone {
                    nodes[*node as usize] = None;
                }
            }
        });
    }

    fn plan(&mut self, nodes: &[Node]) -> Arc<Plan> {
        let graph = Graph::new(nodes);
        let key = graph.key();
        if let Some(plan) = self.cache.get(&key) {
            return plan;
        }
        let plan = Arc::new(self.planner.plan(&graph, &self.options));
        if plan.complete {
            self.cache.insert(key, plan.clone());
        }
        plan
    }

    /// The inner buffer of an operand, or why there is none.
    fn ready(&self, buffer: &Buffer) -> Result<Buffer> {
        match value::state(self.queue, buffer)? {
            State::Ready(inner) => Ok(inner.clone()),
            State::Failed(error) => Err(error.clone()),
            State::Pending => Err(self.mistake("a value was needed before it was computed")),
        }
    }

    fn mistake(&self, what: &str) -> Error {
        Error::DeviceFailed {
            device: self.inner.name().into(),
            detail: format!(
                "{what}: this is a mistake of the engine; set ANYMESH_EAGER=1 to run without it"
            ),
        }
    }

    fn launch(&mut self, kernel: Kernel) -> Result<Vec<Buffer>> {
        let views = self.inner.launch(kernel).inspect_err(|error| {
            self.fault.get_or_insert_with(|| error.clone());
        })?;
        Ok(views.into_iter().map(|view| view.buffer).collect())
    }

    /// A launch as it was written down.
    fn single(&mut self, nodes: &[Option<Node>], number: u32) {
        let Some(node) = &nodes[number as usize] else {
            return;
        };
        let done = (|| {
            let mut kernel = node.kernel.clone();
            if let Kernel::RowProgram(call) = &mut kernel {
                call.over &= is_last_reader(nodes, number, &call.inputs[0].buffer);
            }
            if let Kernel::Matmul(call) = &mut kernel
                && let Some(addend) = &mut call.addend
            {
                addend.over &= is_last_reader(nodes, number, &addend.view.buffer);
            }
            for view in kernel.operands_mut() {
                view.buffer = self.ready(&view.buffer)?;
            }
            self.launch(kernel)
        })();
        match done {
            Ok(buffers) => (node.outputs.iter().zip(buffers))
                .for_each(|(output, buffer)| value::settle(output, Ok(buffer))),
            Err(error) => {
                (node.outputs.iter()).for_each(|output| value::settle(output, Err(error.clone())))
            }
        }
    }

    fn fused(&mut self, nodes: &[Option<Node>], fused: &Fused) {
        let done = match self.kernel(nodes, fused) {
            Ok(kernel) => {
                let launched = self.inner.launch(kernel);
                launched.map(|views| views.into_iter().map(|view| view.buffer))
            }
            Err(error) => Err(error),
        };
        match done {
            Ok(buffers) => {
                for ((node, output), buffer) in fused.outputs.iter().zip(buffers) {
                    if let Some(node) = &nodes[*node as usize] {
                        value::settle(&node.outputs[usize::from(*output)], Ok(buffer));
                    }
                }
            }
            // Parts of it may not need what failed, and a kernel that the device refuses may be
            // fine in parts: one by one everything is as it would have been without the engine.
            Err(_) => (fused.nodes.iter()).for_each(|node| self.single(nodes, *node)),
        }
    }

    /// The kernel of several launches.
    fn kernel(&self, nodes: &[Option<Node>], fused: &Fused) -> Result<Kernel> {
        let node = |number: usize| {
            let node = nodes[number].as_ref();
            node.ok_or_else(|| self.mistake("a launch was let go too early"))
        };
        let call_of = |number: usize| {
            let call = fusable(&node(number)?.kernel);
            call.ok_or_else(|| self.mistake("a launch has no program"))
        };
        let mut call = MapCall {
            op: fused.op,
            program: fused.joined.program.clone(),
            shape: fused.shape.clone(),
            inputs: Default::default(),
            indices: fused.joined.indices.iter().cloned().collect(),
            params: Default::default(),
        };
        for reading in &fused.joined.inputs {
            let of = call_of(reading.at.0 as usize)?;
            let view = View {
                buffer: self.ready(&of.inputs[usize::from(reading.at.1)].view.buffer)?,
                dtype: reading.dtype,
                layout: reading.layout.clone(),
            };
            call.inputs.push(MapInput {
                view,
                window: reading.window.clone(),
            });
        }
        for (number, k) in &fused.joined.params {
            call.params.push(call_of(*number)?.params[*k]);
        }
        let Some(reduce) = fused.reduce else {
            return Ok(call.into());
        };
        match &node(reduce as usize)?.kernel {
            Kernel::Reduce(reduce) => Ok(anymesh_kernel::backend::ReduceCall {
                map: call,
                ..reduce.clone()
            }
            .into()),
            _ => Err(self.mistake("a reduction is none")),
        }
    }
}

/// Whether no other launch that waits reads a buffer.
fn is_last_reader(nodes: &[Option<Node>], number: u32, buffer: &Buffer) -> bool {
    let others = (nodes.iter().enumerate()).filter(|(n, _)| *n != number as usize);
    let mut read = (others.filter_map(|(_, node)| node.as_ref()))
        .flat_map(|node| node.kernel.operands())
        .map(|view| &view.buffer);
    !read.any(|other| other.same(buffer))
}
