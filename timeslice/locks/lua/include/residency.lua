-- Where jobs' device state is. Members hold what agents observed, jobs what follows from it for the group.
local OUT = { [''] = true, absent = true, gone = true, suspended = true }

-- job -> residency, for jobs that are not known to be out.
local function residency_of_jobs()
  local found = {}
  local flat = redis.call('HGETALL', jobs_key)
  for i = 1, #flat, 2 do
    local job = string.match(flat[i], '^(.*)/residency$')
    if job then
      found[job] = flat[i + 1]
    end
  end
  return found
end

local JOB_FIELDS = {
  'residency', 'bytes', 'usage_ms', 'last_granted_at_ms', 'token', 'moved', 'phase', 'phase_since_ms', 'phase_id',
  'needs_weights', 'out_at', 'said',
}

local function job_forget(job)
  for _, field in ipairs(JOB_FIELDS) do
    redis.call('HDEL', jobs_key, job .. '/' .. field)
  end
end

-- Its content was dropped at a suspend, and no weight sync has brought it back yet.
local function job_needs_weights(job)
  return redis.call('HGET', jobs_key, job .. '/needs_weights') == '1'
end

-- A grant is evidence: whoever is granted may load on every node, and is taken to have done so there until the node's
-- agent has shown otherwise. One agent that sees nothing can then never speak for the others.
local function job_loads_everywhere(job)
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    local field = node .. '/' .. job .. '/state'
    local state = redis.call('HGET', members_key, field)
    if state ~= 'resident' and state ~= 'unknown' then -- who can't see it now can't see it then
      redis.call('HSET', members_key, field, 'resident')
    end
  end
end

-- Nothing of the job is on the node any more. `at` is `node/job/`.
local function member_forget(at)
  for _, field in ipairs({ 'state', 'bytes', 'device_bytes', 'backend', 'unheld', 'saved', 'why', 'left' }) do
    redis.call('HDEL', members_key, at .. field)
  end
end

-- States in which some of a job is in host memory. The coordinator (swap.py) brings such a job back before its turn.
local SAVED = { suspending = true, suspended = true, restoring = true }

-- Nobody can see the job any more. If its state was not on the device when it was last seen, it is not taken to be there.
local function member_left(at, before, state)
  if state ~= 'unknown' then
    redis.call('HDEL', members_key, at .. 'left')
  elseif SAVED[before] then
    redis.call('HSET', members_key, at .. 'left', '1')
  end
end

-- Why it can't be told whether a job is still on the devices, as a reason.
local function doubt_about(job)
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    local at = node .. '/' .. job .. '/'
    local seen = redis.call('HMGET', members_key, at .. 'state', at .. 'why')
    if seen[1] == 'unknown' then
      return 'job ' .. job .. ' may still be on the devices of node ' .. node .. ': ' .. (seen[2] or '')
    end
  end
  return 'job ' .. job .. ' may still be on the devices'
end

-- Nodes that joined and have not reported since, each with a space before and behind it.
local function is_unheard(node)
  return string.find(S.unheard, ' ' .. node .. ' ', 1, true) ~= nil
end

local function hear(node)
  local from, till = string.find(S.unheard, ' ' .. node .. ' ', 1, true)
  if from then
    set('unheard', string.sub(S.unheard, 1, from - 1) .. string.sub(S.unheard, till + 1))
  end
end

-- Derives a job's residency from what the nodes observed: one doubtful node makes the whole doubtful. `faulted`: an
-- operation left its state in doubt. `unknown`: nobody can see whether it is there.
local function job_recompute(job)
  local seen, bytes = {}, 0
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    local at = node .. '/' .. job .. '/'
    local observed = redis.call('HMGET', members_key, at .. 'state', at .. 'bytes')
    if observed[1] then
      seen[observed[1]] = true
      bytes = bytes + (tonumber(observed[2]) or 0)
    end
  end
  local residency
  if seen.faulted then
    residency = 'faulted'
  elseif seen.unknown then
    residency = 'unknown'
  elseif seen.suspending then
    residency = 'suspending'
  elseif seen.restoring or (seen.resident and seen.suspended) then
    residency = 'restoring'
  elseif seen.resident then
    residency = 'resident'
  elseif seen.suspended then
    residency = 'suspended'
  end
  if residency then
    redis.call('HSET', jobs_key, job .. '/residency', residency, job .. '/bytes', digits(bytes))
  else
    job_forget(job)
  end
  return residency
end

-- A first load that no body followed leaves no evidence: what was presumed by it, and what no agent has seen, is dropped.
local function job_did_not_load(job)
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    local at = node .. '/' .. job .. '/'
    local seen = redis.call('HMGET', members_key, at .. 'state', at .. 'backend')
    if seen[1] == 'resident' and not seen[2] then
      member_forget(at)
    end
  end
  job_recompute(job)
end

-- A node that joins serves the group's devices: a job that was let in before may have loaded here, before anybody looked,
-- be it that what it has on other nodes was moved out since.
local function jobs_may_be_on(node)
  for job, where in pairs(residency_of_jobs()) do
    local field = node .. '/' .. job .. '/state'
    if where ~= 'absent' and where ~= 'gone' and redis.call('HEXISTS', members_key, field) == 0 then
      redis.call('HSET', members_key, field, 'resident')
      job_recompute(job)
    end
  end
end

-- Whether some node has state of the job in host memory, or had when the job was last seen there.
local function is_saved(job)
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    local at = node .. '/' .. job .. '/'
    local seen = redis.call('HMGET', members_key, at .. 'state', at .. 'left')
    if SAVED[seen[1] or ''] or seen[2] == '1' then
      return true
    end
  end
  return false
end
