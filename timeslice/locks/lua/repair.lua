--[[
Puts right what can be put right without a guess, by an operator's order.
ARGV  1 floor  2 by whom  3 why, or ''  4 '1': only tell what would be done
      then jobs of which that operator says that nothing of them is on any device
Reply ok line ... (what was or would be done) | refused why (nothing was done)
Events GroupRepaired, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local dry, told = ARGV[4] == '1', { 'ok' }

-- An operator's word decides only what nobody can see.
local function why_not_out(job)
  local where = residency_of_jobs()[job] or 'absent'
  if S.lease_id ~= '' and S.job == job then
    return 'job ' .. job .. ' holds the group; take that away first: timeslice revoke'
  elseif S.swap_id ~= 0 then
    return 'a swap is under way; wait until it is over'
  elseif where ~= 'unknown' then
    return 'job ' .. job .. ' is ' .. where .. ', which is known; only of a job that is unknown can you say that it is out'
  end
end

-- Notes a repair, and says whether to make it.
local function repair(what)
  told[#told + 1] = what
  return not dry
end

-- The waiter that a field of the records belongs to: a gang's own ones, those of its ranks, and those that lead to it.
local function whose(field, value)
  if string.sub(field, 1, 1) == '@' or string.match(field, '/gang$') then
    return string.match(value, '^%S*')
  end
  return string.match(field, '^([^/]*)/') or ''
end

-- Nobody can ever serve such an entry, or know whose it is.
local function drop_half_waiters()
  for _, waiter in ipairs(redis.call('ZRANGE', queue_key, 0, -1)) do
    if redis.call('HEXISTS', waiters_key, waiter .. '/job') == 0
      and repair('dropped queue entry ' .. waiter .. ', which has no record') then
      waiter_drop(waiter)
    end
  end
  local flat, order, fields = redis.call('HGETALL', waiters_key), {}, {}
  for f = 1, #flat, 2 do
    local waiter = whose(flat[f], flat[f + 1])
    if not fields[waiter] then
      order[#order + 1], fields[waiter] = waiter, {}
    end
    table.insert(fields[waiter], flat[f])
  end
  for _, waiter in ipairs(order) do
    local holds = S.gang ~= '' and waiter == S.lease_id -- its ranks are noted there
    if not holds and not redis.call('ZSCORE', queue_key, waiter) and not is_alive(waiter)
      and repair('dropped the record of ' .. waiter .. ', which does not wait') then
      waiter_drop(waiter)
      for _, field in ipairs(fields[waiter]) do
        redis.call('HDEL', waiters_key, field)
      end
    end
  end
end

-- What is noted of a node that left, where nothing is on it; what is on it is not ours to forget.
local function drop_half_members()
  local nodes, taken = {}, {}
  local flat = redis.call('HGETALL', members_key)
  for f = 1, #flat, 2 do
    local node, job, field = string.match(flat[f], '^([^/]+)/([^/]+)/(.*)$')
    if node and not redis.call('ZSCORE', nodes_key, node) then
      nodes[node] = nodes[node] or {}
      table.insert(nodes[node], flat[f])
      taken[node] = taken[node] or (field == 'state' and (not OUT[flat[f + 1]] or flat[f + 1] == 'suspended'))
    end
  end
  for node, fields in pairs(nodes) do
    if not taken[node] and repair('dropped what was noted of node ' .. node .. ', which left') then
      for _, field in ipairs(fields) do
        redis.call('HDEL', members_key, field)
      end
    end
  end
end

local function all_nodes(check)
  local nodes = redis.call('ZRANGE', nodes_key, 0, -1)
  for _, node in ipairs(nodes) do
    if not check(node) then
      return false
    end
  end
  return #nodes > 0
end

-- A job that no node knows, though each has told what is on it.
local function drop_half_jobs()
  for job in pairs(residency_of_jobs()) do
    local unknown = all_nodes(function(node)
      return not redis.call('HGET', members_key, node .. '/' .. job .. '/state')
    end)
    if unknown and job ~= S.job and job ~= S.swap_job and repair('forgot job ' .. job .. ': no node has anything of it') then
      job_recompute(job)
    end
  end
end

local function drop_swap()
  local begun = not all_nodes(function(node)
    return redis.call('HGET', members_key, node .. '/@/swap') ~= digits(S.swap_id)
  end)
  if S.swap_id ~= 0 and S.swap_deadline_ms < now and not begun
    and repair('dropped swap ' .. digits(S.swap_id) .. ', which no node had begun') then
    clear_swap()
  end
end

-- Every node has told since that the job is out.
local function end_proved_eviction()
  for _, where in pairs(residency_of_jobs()) do
    if not OUT[where] then
      return false
    end
  end
  local out = all_nodes(function(node)
    return OUT[redis.call('HGET', members_key, node .. '/' .. S.evict .. '/state') or '']
  end)
  if out and repair('job ' .. S.evict .. ' is off the device on every node, and need not be moved') then
    end_eviction('')
  end
  return out
end

-- Agents go by the number: what was granted before it is out, what is granted later may be there again.
local function note_out(job)
  if repair('job ' .. job .. ' is on no device, by the word of ' .. ARGV[2]) then
    redis.call('HSET', jobs_key, job .. '/out_at', digits(draw()))
    for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
      local at = node .. '/' .. job .. '/'
      local seen = redis.call('HMGET', members_key, at .. 'state', at .. 'left')
      if seen[1] == 'unknown' and seen[2] == '1' then
        redis.call('HSET', members_key, at .. 'state', 'suspended') -- what is in host memory is on no device
        redis.call('HDEL', members_key, at .. 'left', at .. 'why')
      elseif seen[1] == 'unknown' then
        member_forget(at)
      end
    end
    job_recompute(job)
    set('changed_ms', now)
  end
end

local function end_deferrals(proved)
  for _, waiter in ipairs(redis.call('ZRANGE', queue_key, 0, -1)) do
    if is_deferred(waiter_get(waiter)) and repair('waiter ' .. waiter .. ' is tried again now') then
      redis.call('HDEL', waiters_key, waiter .. '/deferred', waiter .. '/deferred_at_ms', waiter .. '/deferred_until_ms')
    end
  end
  if S.evict_how ~= '' and S.evict_until_ms > now and not proved and repair('moving job ' .. S.evict .. ' out is tried again now') then
    set('evict_until_ms', 0)
  end
end

begin(true)
for i = 5, #ARGV do
  local why = why_not_out(ARGV[i])
  if why then
    return { 'refused', why }
  end
end
if not dry then
  settle_clock()
  reap()
end
for i = 5, #ARGV do
  note_out(ARGV[i])
end
drop_half_waiters()
drop_half_members()
drop_swap()
local proved = false
if S.unheard == '' and not silent_node() then
  drop_half_jobs()
  if S.evict ~= '' and S.lease_id == '' and S.swap_id == 0 then
    proved = end_proved_eviction()
  end
end
end_deferrals(proved)
if not dry then
  if #told > 1 then
    emit('GroupRepaired', 'by', ARGV[2], 'reason', ARGV[3], 'did', table.concat(told, '; ', 2))
  end
  wake('repair')
  advance()
  save()
end
return told
